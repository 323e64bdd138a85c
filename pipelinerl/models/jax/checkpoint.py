"""Weights of a Hugging Face directory as sharded JAX arrays, and back, one parameter at a time.

Each device's part is read from the files separately, so the host never holds more than one part of one parameter,
besides the page cache. An error names the missing, misshapen or unknown tensor. Exported weights have the names, shapes
and order of `config.parameters`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P, Sharding
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import VALUE_HEAD_FILE, weight_files
from pipelinerl.models.decoder_config import HEAD, VALUE_BIAS, VALUE_WEIGHT, DecoderConfig, Parameter
from pipelinerl.models.finite_weights import refuse_not_finite

Storage = Callable[[Parameter], Sharding]

_PREFIX: Final = "model."
#: Parameters of a value model's head, and their names in its file.
_VALUE_HEAD: Final = {VALUE_WEIGHT: "weight", VALUE_BIAS: "bias"}


def load_weights(path: Path, config: DecoderConfig, *, place: Storage, dtype: Any = np.float32) -> dict[str, jax.Array]:
    """Load every parameter, stacked over layers and divided by `place`.

    Args:
        path: a directory with `*.safetensors`, whole or in shards.
        place: the sharding of `parameter.stacked_shape`.
        dtype: of the arrays; the files' own is converted.

    A value model's head comes from a separate file; without it the head is zero, and so is every value.

    Raises:
        ModelError: a file is damaged, or a tensor is missing, misshapen, unknown to the decoder or not finite.
    """
    trunk = [parameter for parameter in config.parameters if parameter.name not in _VALUE_HEAD]
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(str(file), framework="np")) for file in weight_files(path)]
            tensors = {_whole_name(name): file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118
            _check(tensors, trunk, config, path)
            loaded = {
                parameter.name: _divided(path, parameter, place(parameter), tensors, np.dtype(dtype))
                for parameter in trunk
            }
        return loaded | _value_head(path, config, place, np.dtype(dtype))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"the weights in {path} are damaged: {error}; copy them again") from error


def export_weight(
    weights: Mapping[str, jax.Array], parameter: Parameter, layer: int | None, *, dtype: Any
) -> jax.Array:
    """Return a parameter (of `layer`, if stacked) in `dtype`, whole on every device.

    Each device holds only one whole parameter at a time. With devices of several processes, every process must call
    this, because gathering is collective.
    """
    array = weights[parameter.name]
    sharding = array.sharding
    everywhere = NamedSharding(sharding.mesh, P()) if isinstance(sharding, NamedSharding) else sharding
    return _gathered(array, 0 if layer is None else layer, layer is not None, np.dtype(dtype), everywhere)


def place_weights(
    config: DecoderConfig, read: Callable[[str], NDArray[np.uint8]], *, like: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Return weights from host bytes in `config.dtype`, stacked and placed like `like`: the inverse of gathering.

    Each device gets its own part. Dtype and sharding are those of `like`, so programs compiled for it can be reused.
    `read` returns a parameter's bytes by its name in a layer. It is called once for each name, always in the same
    order. The host holds one such parameter, besides the parts of its own devices.
    """
    dtype = jax.numpy.dtype(config.dtype)

    def placed(parameter: Parameter) -> jax.Array:
        model, shape = like[parameter.name], parameter.stacked_shape
        places = model.sharding.addressable_devices_indices_map(shape).values()
        indices = {_key(index): index for index in places if index is not None}
        part_shape = model.sharding.shard_shape(shape)
        parts: dict[Any, np.ndarray[Any, Any]] = {key: np.empty(part_shape, model.dtype) for key in indices}
        for layer, name in enumerate(parameter.names):
            whole = read(name).view(dtype).reshape(parameter.shape)
            for key, index in indices.items():
                if parameter.layers is None:
                    parts[key][...] = whole[index]
                else:  # layers are never divided
                    parts[key][layer] = whole[index[1:]]
        return jax.make_array_from_callback(shape, model.sharding, lambda index: parts[_key(index or ())])

    return {parameter.name: placed(parameter) for parameter in config.parameters}


def _key(index: tuple[slice, ...]) -> tuple[tuple[int | None, int | None], ...]:
    """Return a part's place as a key, because Python 3.11 cannot hash slices."""
    return tuple((part.start, part.stop) for part in index)


def export_order(config: DecoderConfig) -> Iterator[tuple[Parameter, int | None]]:
    """Yield every parameter with its layer, in the order of `weight_layout`: embedding, layer by layer, norm, head."""
    first, *rest = (parameter for parameter in config.parameters if parameter.layers is None)
    stacked = [parameter for parameter in config.parameters if parameter.layers is not None]
    yield first, None
    yield from ((parameter, layer) for layer in range(config.layers) for parameter in stacked)
    yield from ((parameter, None) for parameter in rest)


@partial(jax.jit, static_argnums=(2, 3, 4))
def _gathered(array: jax.Array, layer: int, stacked: bool, dtype: np.dtype[Any], everywhere: Sharding) -> jax.Array:
    """Return one layer's parameter, or an unstacked one, in `dtype` on every device."""
    one = lax.dynamic_index_in_dim(array, layer, keepdims=False) if stacked else array
    return lax.with_sharding_constraint(one.astype(dtype), everywhere)


def _value_head(path: Path, config: DecoderConfig, place: Storage, dtype: np.dtype[Any]) -> dict[str, jax.Array]:
    """Return the parameters of a value model's head; none for a language model."""
    heads = [parameter for parameter in config.parameters if parameter.name in _VALUE_HEAD]
    file = path / VALUE_HEAD_FILE
    saved = load_file(file) if heads and file.is_file() else {}
    loaded: dict[str, jax.Array] = {}
    for parameter in heads:
        whole = saved.get(_VALUE_HEAD[parameter.name], np.zeros(parameter.shape, dtype)).astype(dtype)
        if whole.shape != parameter.shape:
            raise ModelError(f"{file} must fit the model beside it, {list(parameter.shape)}, got {list(whole.shape)}")
        loaded[parameter.name] = jax.make_array_from_callback(whole.shape, place(parameter), whole.__getitem__)
    return loaded


def _whole_name(name: str) -> str:
    """Return a tensor's name in a language model; files of value models leave out the prefix `model.`."""
    return name if name == HEAD or name.startswith(_PREFIX) else _PREFIX + name


def _check(tensors: Mapping[str, Any], trunk: Sequence[Parameter], config: DecoderConfig, path: Path) -> None:
    shapes = {name: parameter.shape for parameter in trunk for name in parameter.names}
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelError(f"{path}: the tensor {name!r} is missing from its safetensors files; copy them again")
        found = tuple(tensors[name].get_shape())
        if found != shape:
            raise ModelError(f"{path}: the tensor {name!r} must have the shape {shape} by config.json, got {found}")
    # Files may also hold a tied head or the rotary table; any other extra tensor would be ignored silently.
    extra = sorted(
        name for name in tensors.keys() - shapes if name != HEAD and not name.endswith("rotary_emb.inv_freq")
    )
    if extra:
        raise ModelError(f"{path}: the tensor {extra[0]!r} is no part of a {config.model_type} by its config.json")


def _divided(
    path: Path, parameter: Parameter, sharding: Sharding, tensors: Mapping[str, Any], dtype: np.dtype[Any]
) -> jax.Array:
    """Read and place each device's part."""
    shape = parameter.stacked_shape

    def part(index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        within = index if parameter.layers is None else index[1:]
        stored = {name: tensors[name][within] for name in parameter.names}
        for name, values in stored.items():
            refuse_not_finite(path, name, values, values.dtype.name)
        read = [values.astype(dtype, copy=False) for values in stored.values()]
        return read[0] if parameter.layers is None else np.stack(read)

    parts = sharding.addressable_devices_indices_map(shape)
    placed = [jax.device_put(part(index), device) for device, index in parts.items() if index is not None]
    return jax.make_array_from_single_device_arrays(shape, sharding, placed)
