"""Files of a sharded state: each process writes its rows, and any number of processes can read them.

    shards/00002-of-00004.safetensors    rows of every parameter in fp32, and of <parameter>.exp_avg, .exp_avg_sq
    shards/index.json                    {"shards": 4, "shapes": {parameter: [rows, …]}}

Rows are divided as in `ProcessMesh.rows_of`. Each process saves its rows without gathering, and reads only what it
needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipelinerl.trainers.option_table import damaged
from pipelinerl.trainers.torch.mesh import ProcessMesh
from trainer_contract.errors import StateError

_FOLDER: Final = "shards"
_INDEX: Final = "index.json"
#: The kind that stands for a parameter's own value, in contrast to its moments.
VALUE: Final = "value"


def write_shard(path: Path, rank: int, shards: int, tensors: Mapping[str, Tensor]) -> None:
    """Write one process's tensors, named by `key_of`, into a state's directory; its folder `shards/` may exist."""
    (path / _FOLDER).mkdir(exist_ok=True)
    save_file(dict(tensors), path / _FOLDER / _file(rank, shards))


def write_index(path: Path, shards: int, shapes: Mapping[str, torch.Size]) -> None:
    """Write the index file, which has the number of shards and the parameters' shapes."""
    index = {"shards": shards, "shapes": {name: list(shape) for name, shape in shapes.items()}}
    (path / _FOLDER / _INDEX).write_text(json.dumps(index, indent=1) + "\n")


def key_of(name: str, kind: str) -> str:
    """Return the name, in a shard's file, of the rows of a parameter (`VALUE`) or of one of its moments."""
    return name if kind == VALUE else f"{name}.{kind}"


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """The shards of a state in the directory `path`."""

    path: Path
    mesh: ProcessMesh
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, path: Path) -> ShardFiles | None:
        """Open the shards of a state; None if it is not sharded. Raises StateError."""
        if not (path / _FOLDER).is_dir():
            return None
        try:
            index: dict[str, Any] = json.loads((path / _FOLDER / _INDEX).read_text())
            mesh = ProcessMesh(dp_shard=int(index["shards"]))
            shapes = {str(name): tuple(map(int, shape)) for name, shape in index["shapes"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise damaged(path, error) from error
        missing = [
            each for rank in range(mesh.size) if not (path / _FOLDER / (each := _file(rank, mesh.size))).is_file()
        ]
        if missing:
            raise StateError(f"the trainer state in {path} lacks {', '.join(missing)}; restore another checkpoint")
        return cls(path, mesh, shapes)

    def check(self, shapes: Mapping[str, torch.Size]) -> None:
        """Raise StateError unless `shapes` has exactly the parameters that were saved."""
        if self.shapes != {name: tuple(shape) for name, shape in shapes.items()}:
            raise StateError(f"the parameters in {self.path} are not those of this model; restore another checkpoint")

    def rows(self, name: str, kind: str, wanted: slice) -> Tensor:
        """Read the `wanted` rows of a parameter or of one of its moments. Raises StateError if damaged."""
        length, *inner = self.shapes[name]
        parts = []
        for rank in range(self.mesh.size):
            stored = self.mesh.rows_of(rank, length)
            start, stop = max(stored.start, wanted.start), min(stored.stop, wanted.stop)
            if start < stop:
                parts.append(self._read(rank, key_of(name, kind), slice(start - stored.start, stop - stored.start)))
        if not parts:
            return torch.empty((0, *inner))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _read(self, rank: int, key: str, rows: slice) -> Tensor:
        try:
            with safe_open(self.path / _FOLDER / _file(rank, self.mesh.size), framework="pt") as file:
                read: Tensor = file.get_slice(key)[rows]
        except (OSError, SafetensorError) as error:
            raise damaged(self.path, error) from error
        if len(read) != rows.stop - rows.start:
            raise StateError(f"the rows of {key!r} in {self.path} are incomplete; restore another checkpoint")
        return read


def _file(rank: int, shards: int) -> str:
    return f"{rank + 1:05d}-of-{shards:05d}.safetensors"
