"""`write_weights`: save a trainer's gathered weights as a safetensors file, under their own names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from safetensors import TensorSpec, serialize_file

from trainer_contract.host_weights import bytes_of
from trainer_contract.types import ParameterInfo


def write_weights(path: Path, layout: Iterable[ParameterInfo], weights: Iterable[tuple[str, Any]]) -> None:
    """Write arrays of any library, or raw bytes; `layout` gives their dtypes and shapes. Raises OSError."""
    infos = {info.name: info for info in layout}
    buffers = {name: bytes_of(array) for name, array in weights}  # kept alive: `serialize_file` reads their addresses
    specs = {
        name: TensorSpec(
            dtype=infos[name].dtype, shape=infos[name].shape, data_ptr=buffer.ctypes.data, data_len=buffer.nbytes
        )
        for name, buffer in buffers.items()
    }
    serialize_file(specs, path, metadata={"format": "pt"})
