"""`WeightWriter`: a trainer's weights, written in the form of the model directory from which they came.

Trainers and engines name parameters as transformers does in memory, where it may rename stored tensors or join several:
`mlp.experts.gate_up_proj` holds the matrices of all experts of a layer. Other programs, and other versions of
transformers, know only the names in model directories. `WeightWriter` therefore undoes transformers' conversions. The
file has exactly the tensors of the model directory, with their names and shapes.

Tensors that no trainer changes are copied from the model directory: persistent buffers, such as a router's correction
bias, and layers that transformers does not load, such as those for multi-token prediction. Buffers are not part of
weight updates either. Every engine reads them from its own model directory, and training leaves them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file

from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import (
    StoredTensor,
    empty_model,
    model_dtype,
    model_type,
    stored_tensors,
    weight_files,
)
from pipelinerl.models.decoder_config import FAMILIES
from pipelinerl.models.weight_reader import ConversionTable, StoredPart
from trainer_contract.host_weights import bytes_of
from trainer_contract.types import ParameterInfo

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

#: Bytes u8 [n] of a tensor, with its dtype and shape.
_Buffer = tuple[str, tuple[int, ...], NDArray[np.uint8]]


class _Conversion(NamedTuple):
    """A conversion by transformers of stored tensors to the parameters `names`.

    `undo` maps the values of the parameters, by name, to those of the stored tensors; `keys` maps the names in its
    result to the names in the file.
    """

    names: tuple[str, ...]
    keys: Mapping[str, str]
    undo: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class WeightWriter:
    """Writes weights with the tensors of one model directory."""

    _files: Mapping[str, tuple[Path, StoredTensor]]
    _layout: Mapping[str, ParameterInfo]
    #: Dtype of the file's tensors, by name.
    _dtypes: Mapping[str, str]
    #: The parameter whose value each stored tensor has, by the stored tensor's name.
    _named: Mapping[str, str]
    _conversions: Sequence[_Conversion]

    @classmethod
    def of(cls, path: Path, layout: Iterable[ParameterInfo]) -> Self:
        """Return the writer for a trainer with this layout, whose model came from the directory `path`.

        Tensors stored in the model's dtype (`model_dtype`) get the layout's dtype; others keep their own. Raises
        ModelError if the directory is damaged, or a parameter cannot be written in its form.
        """
        files = {key: (file, each) for file in weight_files(path) for key, each in stored_tensors(file).items()}
        infos = {info.name: info for info in layout}
        if _is_plain(path, infos, files):
            named, conversions = {name: name for name in infos if name in files}, list[_Conversion]()
        else:
            named, conversions = _undone(path, empty_model(path), infos)
        written = {*named.values(), *(name for each in conversions for name in each.names)}
        if lacking := sorted(infos.keys() - written):
            raise ModelError(
                f"{path} stores {len(lacking)} of the trainer's parameters in a form that cannot be written, first "
                f"{lacking[0]}; save the model again with transformers' save_pretrained"
            )
        own, sent = model_dtype(path), next((info.dtype for info in infos.values()), "float32")
        changed = {*named, *(key for each in conversions for key in each.keys.values())}
        dtypes = {key: sent if key in changed and each.dtype == own else each.dtype for key, (_, each) in files.items()}
        return cls(files, infos, dtypes, named, conversions)

    def write(self, file: Path, weights: Iterable[tuple[str, Any]]) -> None:
        """Write the output of `Trainer.gather_weights` and the tensors that no trainer changes. Raises OSError."""
        given = {name: bytes_of(array) for name, array in weights}
        made: dict[str, _Buffer] = {}
        for key, name in self._named.items():
            info = self._layout[name]
            made[key] = self._cast(key, (info.dtype, info.shape, given[name]))
        for conversion in self._conversions:
            values = {name: _tensor(self._layout[name], given.pop(name)) for name in conversion.names}
            for result, values_of_key in conversion.undo(values).items():
                key = conversion.keys[result]
                made[key] = self._cast(key, _buffer(values_of_key))
        for key, (source, stored) in self._files.items():
            if key not in made:
                data = np.empty(0, np.uint8)
                if stored.size:
                    data = np.memmap(source, np.uint8, "r", offset=stored.start, shape=(stored.size,))
                made[key] = (stored.dtype, stored.shape, data)
        write_tensors(file, made)

    def _cast(self, key: str, buffer: _Buffer) -> _Buffer:
        dtype, shape, data = buffer
        wanted = self._dtypes[key]
        if dtype == wanted:
            return buffer
        import torch

        cast: Tensor = _tensor(ParameterInfo(key, shape, dtype), data).to(getattr(torch, wanted))
        return _buffer(cast)


def write_weights(file: Path, layout: Iterable[ParameterInfo], weights: Iterable[tuple[str, Any]]) -> None:
    """Write weights (arrays of any library, or raw bytes) under the names of `layout`. Raises OSError."""
    infos = {info.name: info for info in layout}
    write_tensors(file, {name: (infos[name].dtype, infos[name].shape, bytes_of(array)) for name, array in weights})


def write_tensors(file: Path, tensors: Mapping[str, _Buffer]) -> None:
    """Write a safetensors file. Raises OSError."""
    specs = {
        name: TensorSpec(dtype=dtype, shape=shape, data_ptr=data.ctypes.data, data_len=data.nbytes)
        for name, (dtype, shape, data) in tensors.items()
    }
    serialize_file(specs, file, metadata={"format": "pt"})


def _is_plain(path: Path, layout: Mapping[str, ParameterInfo], files: Mapping[str, Any]) -> bool:
    """Return whether parameters have the names of the stored tensors, by knowledge that needs no import of torch."""
    kind = model_type(path)
    if kind in ("bigram", *FAMILIES) and layout.keys() == files.keys():
        return True
    from transformers import CONFIG_MAPPING

    return kind not in CONFIG_MAPPING


def _undone(
    path: Path, model: PreTrainedModel, layout: Mapping[str, ParameterInfo]
) -> tuple[dict[str, str], list[_Conversion]]:
    """Return, for each stored tensor that only gets another name, its parameter; and the other conversions."""
    table = ConversionTable.of(model)
    # Map each name of a parameter to its name in the layout, which has shared parameters once. transformers does not
    # tie parameters that are stored twice with different values; then the layout has both.
    state = model.state_dict(keep_vars=True)
    shared = {id(state[name]): name for name in layout if name in state}
    aliases = {name: name if name in layout else shared[id(each)] for name, each in state.items() if id(each) in shared}
    named: dict[str, str] = {}
    conversions = []
    for name, parts in table.stored_parts(path).items():
        pattern = parts[0].pattern
        if pattern is None:
            known = aliases.get(name)
            if known is not None:
                named |= {part.key: known for part in parts if part.shape == layout[known].shape}
        else:
            conversion = _conversion(model, table, name, parts)
            if conversion is not None and layout.keys() >= set(conversion.names):
                conversions.append(conversion)
    return named, conversions


def _conversion(
    model: PreTrainedModel, table: ConversionTable, name: str, parts: Sequence[StoredPart]
) -> _Conversion | None:
    """Return the conversion that joins `parts`; None if transformers cannot undo it exactly."""
    import torch

    empty = {part.key: torch.empty(part.shape, device="meta") for part in parts}
    joined = table.converted(name, [(part, empty[part.key]) for part in parts])
    undo = _Undo(model, table.converters[str(parts[0].pattern)].reverse_transform(), tuple(joined))
    try:
        shapes = {result: tuple(each.shape) for result, each in undo(joined).items()}
    except (RuntimeError, ValueError, KeyError, NotImplementedError):
        return None
    keys = {result: part.key for part in parts for result in table.names_before(part.key) if result in shapes}
    fits = sorted(keys.values()) == sorted(empty) and len(shapes) == len(empty)
    if not fits or any(shapes[result] != tuple(empty[key].shape) for result, key in keys.items()):
        return None
    return _Conversion(tuple(joined), keys, undo)


@dataclass(frozen=True, slots=True)
class _Undo:
    """The reverse of a converter of transformers for the parameters `names`."""

    model: PreTrainedModel
    reverse: Any
    names: tuple[str, ...]

    def __call__(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        from transformers.core_model_loading import dot_natural_key

        converter, target = deepcopy(self.reverse), ""
        for name in sorted(self.names, key=dot_natural_key):
            renamed, pattern = converter.rename_source_key(name)
            target = target or renamed
            converter.add_tensor(target, name, pattern, values[name])
        made: dict[str, Any] = converter.convert(target, model=self.model, config=self.model.config)
        return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


def _tensor(info: ParameterInfo, data: NDArray[np.uint8]) -> Tensor:
    import torch

    return torch.from_numpy(data).view(getattr(torch, info.dtype)).view(info.shape)


def _buffer(tensor: Tensor) -> _Buffer:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), bytes_of(tensor)
