"""The Llama family (Llama, Mistral, Qwen2, Qwen3), OLMo 2 and 3, and Gemma 3 in plain JAX.

All functions are pure functions of a mapping from names to arrays.

Weights are read from a Hugging Face directory as sharded arrays, each device's part separately, and exported one
parameter at a time. Names and layouts are Hugging Face's. Parameters inside layers are stacked: one array holds a
parameter of all layers, with `*` for the layer's number in its name. `lax.scan` runs over the leading dimension.

    weights["model.layers.*.self_attn.q_proj.weight"]      [L, H·d, D]

Training and decoding differ only in the arguments `attend` and `fetch` of `hidden_states`. `attend` takes a layer's
queries, keys, values and state (a cache, or nothing); `fetch` casts a layer's weights or gathers them from shards.

Letters in shapes: … any leading dimensions, D hidden size, H heads, K key-value heads, d head size, L layers, V tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec as P, Sharding
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import VALUE_HEAD_FILE, weight_files
from pipelinerl.models.decoder_config import (
    EMBEDDING,
    HEAD,
    LAYER,
    NORM,
    VALUE_BIAS,
    VALUE_WEIGHT,
    DecoderConfig,
    Parameter,
    Rotary,
)
from pipelinerl.models.directory_files import refuse_not_finite

#: Arrays by name; within one layer, names lack the prefix `model.layers.*.`.
Weights = Mapping[str, Array]
#: More tokens than any sequence has.
_EVERYTHING: Final = 2**30
State = TypeVar("State")
#: Function (query […, H, d], key […, K, d], value […, K, d], layer's state) → (attended […, H, d], new state). In a
#: model with sliding windows, a fifth argument i32 [] says to how many tokens up to its own a query attends.
Attend = Callable[..., tuple[Array, Any]]
Fetch = Callable[[dict[str, Array]], dict[str, Array]]


def hidden_states(
    config: DecoderConfig,
    weights: Weights,
    token_ids: Array,
    positions: Array,
    attend: Attend,
    state: State | None = None,
    *,
    fetch: Fetch = lambda layer: layer,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda layer: layer,
    scan: Callable[..., tuple[Array, Any]] = lax.scan,
) -> tuple[Array, State | None]:
    """Run all layers and the last norm.

    Args:
        weights: every parameter of `config.parameters`.
        token_ids, positions: i32 […].
        attend: computes attention alone, after projection and rotation.
        state: a pytree whose arrays have a leading dimension L; each layer receives its slice and returns a new one.
        fetch: applied to one layer's weights inside the loop, and to weights outside the layers where they are used.
        wrap: applied to the function of one layer, for rematerialisation.
        scan: runs the layers, as `lax.scan` does; a trainer passes a function that also sums the layers' gradients.

    Returns:
        […, D] in the dtype of the fetched weights, and the new state.
    """
    angles = rotary(config.rotary, config, positions)
    local = angles if config.local_rotary is None else rotary(config.local_rotary, config, positions)
    x = embed(weights, token_ids, fetch=fetch)
    if config.is_gemma:
        x = x * jnp.asarray(config.hidden**0.5, x.dtype)

    def normed(own: Weights, name: str, x: Array) -> Array:
        return norm(config, x, own[f"{name}.weight"]) if name else x

    def layer(x: Array, inputs: tuple[dict[str, Array], Any]) -> tuple[Array, Any]:
        own, (slides, cache) = fetch(inputs[0]), inputs[1]
        before, after, before_mlp, after_mlp = config.norms
        cos, sin = angles if slides is None else (jnp.where(slides, *pair) for pair in zip(local, angles, strict=True))
        query, key, value = attention_inputs(config, own, normed(own, before, x), cos, sin)
        reach = () if slides is None else (jnp.where(slides, config.window or 0, _EVERYTHING),)
        attended, cache = attend(query, key, value, cache, *reach)
        attended = linear(own, "self_attn.o_proj", attended.reshape(*x.shape[:-1], -1))
        x = x + normed(own, after, attended)
        return x + normed(own, after_mlp, gated_mlp(config, own, normed(own, before_mlp, x))), cache

    slides = jnp.asarray(config.slides) if config.slides else None
    x, state = scan(wrap(layer), x, (layer_weights(weights), (slides, state)))
    return norm(config, x, fetch({NORM: weights[NORM]})[NORM]), state


def layer_weights(weights: Weights) -> dict[str, Array]:
    """Return the parameters of layers, still stacked, by their names within a layer."""
    return {name.removeprefix(LAYER): array for name, array in weights.items() if name.startswith(LAYER)}


def embed(weights: Weights, token_ids: Array, *, fetch: Fetch = lambda layer: layer) -> Array:
    """Return embeddings […, D] of tokens […]."""
    return jnp.take(fetch({EMBEDDING: weights[EMBEDDING]})[EMBEDDING], token_ids, axis=0)


def output_embedding(weights: Weights, *, fetch: Fetch = lambda layer: layer) -> Array:
    """Return the output layer's weight [V, D], which is the input embedding's if the model ties them."""
    name = HEAD if HEAD in weights else EMBEDDING
    return fetch({name: weights[name]})[name]


def rotary(embedding: Rotary, config: DecoderConfig, positions: Array) -> tuple[Array, Array]:
    """Return cos and sin f32 […, 1, d/2] of positions […], ready to broadcast over heads (Su et al. 2021)."""
    angles = positions[..., None, None].astype(jnp.float32) * embedding.frequencies(config.head_dim)
    return jnp.cos(angles) * embedding.scale, jnp.sin(angles) * embedding.scale


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the pairs (x_i, x_{i + d/2}) of each head of x […, H, d], in fp32, and return x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x.dtype)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Return x / rms(x) · weight over the last dimension; the mean of squares is fp32 (Zhang and Sennrich 2019)."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight.astype(x.dtype)


def norm(config: DecoderConfig, x: Array, weight: Array) -> Array:
    """Return the RMS norm of x over the last dimension; Gemma multiplies by 1 + weight, in fp32."""
    if not config.is_gemma:
        return rms_norm(x, weight, config.norm_eps)
    return rms_norm(x.astype(jnp.float32), 1.0 + weight.astype(jnp.float32), config.norm_eps).astype(x.dtype)


def linear(layer: Weights, name: str, x: Array) -> Array:
    """Return x · weightᵀ, […, out], for x […, in], plus the bias if the layer has one."""
    weight = layer[f"{name}.weight"]
    y = jnp.einsum("...i,oi->...o", x, weight)
    bias = layer.get(f"{name}.bias")
    return y if bias is None else y + bias


def attention_inputs(
    config: DecoderConfig, layer: Weights, h: Array, cos: Array, sin: Array
) -> tuple[Array, Array, Array]:
    """Return queries […, H, d] and keys […, K, d], rotated and optionally normed, and values […, K, d]."""
    query, key, value = (linear(layer, f"self_attn.{name}_proj", h) for name in ("q", "k", "v"))

    def heads(x: Array, count: int, name: str = "") -> Array:
        """Divide x into heads, with the norm `name` before or after it."""
        weight = layer[f"self_attn.{name}.weight"] if name and config.qk_norm else None
        if weight is not None and config.whole_qk_norm:
            x, weight = norm(config, x, weight), None
        x = x.reshape(*h.shape[:-1], count, config.head_dim)
        return x if weight is None else norm(config, x, weight)

    query, key = heads(query, config.heads, "q_norm"), heads(key, config.kv_heads, "k_norm")
    query = rotated(query, cos, sin)
    if config.query_scale is not None:  # attention itself scales by 1 / √d
        query = query * jnp.asarray(config.query_scale * config.head_dim**0.5, query.dtype)
    return query, rotated(key, cos, sin), heads(value, config.kv_heads)


def gated_mlp(config: DecoderConfig, layer: Weights, h: Array) -> Array:
    """Return the gated MLP down(act(gate(h)) · up(h)), […, D]; act is silu, or Gemma's gelu."""
    gate = linear(layer, "mlp.gate_proj", h)
    gate = jax.nn.gelu(gate, approximate=True) if config.is_gemma else jax.nn.silu(gate)
    return linear(layer, "mlp.down_proj", gate * linear(layer, "mlp.up_proj", h))


def grouped_attention(query: Array, key: Array, value: Array, visible: Array) -> Array:
    """Return softmax(q·kᵀ / √d)·v [B, Q, H, d]; each key-value head serves H / K query heads; softmax in fp32.

    Args:
        query: [B, Q, H, d], Q queries in each of B sequences; key, value: [B, T, K, d], for T positions.
        visible: bool, broadcast to [B, Q, T]; every query must see at least one position.
    """
    batch, rows, heads, width = query.shape
    grouped = query.reshape(batch, rows, key.shape[2], heads // key.shape[2], width)
    scores = jnp.einsum("bqkgd,btkd->bkgqt", grouped, key, preferred_element_type=jnp.float32) * width**-0.5
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    shares = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgqt,btkd->bqkgd", shares, value).reshape(query.shape)


#: JAX's two names for the environment variable that limits GPU memory. The second is older; setting both is an error.
_VARIABLES: Final = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def bound_memory(share: float | None) -> None:
    """Limit this process to `share` of each GPU, unless the user's environment does; call it before JAX starts."""
    if share is not None and not any(name in os.environ for name in _VARIABLES):
        os.environ[_VARIABLES[0]] = f"{share:g}"


Storage = Callable[[Parameter], Sharding]

_PREFIX: Final = "model."
#: Names of a value head's parameters, mapped to their names in the head's file.
_VALUE_HEAD: Final = {VALUE_WEIGHT: "weight", VALUE_BIAS: "bias"}


def load_weights(path: Path, config: DecoderConfig, *, place: Storage, dtype: Any = np.float32) -> dict[str, jax.Array]:
    """Load every parameter, stacked over layers, in `dtype`; `place` returns a parameter's sharding.

    A value model's head has a separate file; without that file the head's parameters are 0, so all values are 0.

    Raises:
        ModelError: a file is damaged, or a tensor is missing, misshapen, unknown to the decoder or not finite.
    """
    trunk = [parameter for parameter in config.parameters if parameter.name not in _VALUE_HEAD]
    try:
        with ExitStack() as stack:
            files = [stack.enter_context(safe_open(str(file), framework="np")) for file in weight_files(path)]
            tensors = {  # files of value models omit the prefix
                name if name == HEAD or name.startswith(_PREFIX) else _PREFIX + name: file.get_slice(name)
                for file in files
                for name in file.keys()  # noqa: SIM118
            }
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
    """Return a parameter (its slice `layer` if stacked) in `dtype` on every device; every process must call this."""
    array = weights[parameter.name]
    sharding = array.sharding
    everywhere = NamedSharding(sharding.mesh, P()) if isinstance(sharding, NamedSharding) else sharding
    return _gathered(array, 0 if layer is None else layer, layer is not None, np.dtype(dtype), everywhere)


def place_weights(
    config: DecoderConfig, read: Callable[[str], NDArray[np.uint8]], *, like: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Build stacked weights from host bytes in `config.dtype`; they get the dtype and sharding of the arrays `like`.

    Programs compiled for `like` can therefore run on the result. `read` takes the name of one layer's parameter and
    returns its bytes; it is called once for each name, in a fixed order. At any time, the host holds one parameter of
    one layer in full, and the shards of its own devices.
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
                else:  # the dimension of layers is never sharded
                    parts[key][layer] = whole[index[1:]]
        return jax.make_array_from_callback(shape, model.sharding, lambda index: parts[_key(index or ())])

    return {parameter.name: placed(parameter) for parameter in config.parameters}


def _key(index: tuple[slice, ...]) -> tuple[tuple[int | None, int | None], ...]:
    """Convert a shard's index to a dictionary key, because Python 3.11 cannot hash slices."""
    return tuple((part.start, part.stop) for part in index)


def export_order(config: DecoderConfig) -> Iterator[tuple[Parameter, int | None]]:
    """Yield (parameter, layer) as trainers send them: embedding, layers, norm, head; layer None outside the layers."""
    first, *rest = (parameter for parameter in config.parameters if parameter.layers is None)
    stacked = [parameter for parameter in config.parameters if parameter.layers is not None]
    yield first, None
    yield from ((parameter, layer) for layer in range(config.layers) for parameter in stacked)
    yield from ((parameter, None) for parameter in rest)


@partial(jax.jit, static_argnums=(2, 3, 4))
def _gathered(array: jax.Array, layer: int, stacked: bool, dtype: np.dtype[Any], everywhere: Sharding) -> jax.Array:
    one = lax.dynamic_index_in_dim(array, layer, keepdims=False) if stacked else array
    return lax.with_sharding_constraint(one.astype(dtype), everywhere)


def _value_head(path: Path, config: DecoderConfig, place: Storage, dtype: np.dtype[Any]) -> dict[str, jax.Array]:
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


def _check(tensors: Mapping[str, Any], trunk: Sequence[Parameter], config: DecoderConfig, path: Path) -> None:
    shapes = {name: parameter.shape for parameter in trunk for name in parameter.names}
    for name, shape in shapes.items():
        if name not in tensors:
            raise ModelError(f"{path}: the tensor {name!r} is missing from its safetensors files; copy them again")
        found = tuple(tensors[name].get_shape())
        if found != shape:
            raise ModelError(f"{path}: the tensor {name!r} must have the shape {shape} by config.json, got {found}")
    # A tied output layer and the rotary table may be in the files, too. Reject any other extra tensor, because it would
    # be ignored silently.
    extra = sorted(
        name for name in tensors.keys() - shapes if name != HEAD and not name.endswith("rotary_emb.inv_freq")
    )
    if extra:
        raise ModelError(f"{path}: the tensor {extra[0]!r} is no part of a {config.model_type} by its config.json")


def _divided(
    path: Path, parameter: Parameter, sharding: Sharding, tensors: Mapping[str, Any], dtype: np.dtype[Any]
) -> jax.Array:
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
