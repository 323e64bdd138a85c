"""Checkpoint state of a `TorchTrainer`: bit-exact, without pickle.

    model/                  a regular Hugging Face model directory (fp32), including a value head
    optimizer.safetensors   <parameter>.exp_avg, <parameter>.exp_avg_sq (in the optimizer's dtype), <parameter>.step,
                            and rng.cpu / rng.cuda
    trainer.json            format, head, model_version, architecture

With adapters, `adapter/` in peft's format replaces `model/`; moments cover only trained parameters; and `trainer.json`
has `lora`: rank, alpha, targets, and a digest of the base. The base's weights are not written.

With several processes, each writes its rows of the model and of the moments, without gathering, below `shards/`, which
replaces `model/`. Any number of processes can read them. `optimizer.safetensors` then has only step counts and random
state.

    shards/00002-of-00004.safetensors    rows of every parameter in fp32, and of <parameter>.exp_avg, .exp_avg_sq,
                                         divided as in `ProcessMesh.rows_of`
    shards/index.json                    {"shards": 4, "shapes": {parameter: [rows, …]}}

This module checks that the state is complete and of the expected model; its caller verifies digests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig

from pipelinerl.models.checkpoint import VALUE_HEAD_FILE
from pipelinerl.trainers.option_table import architecture_of, damaged, read_record, write_record
from pipelinerl.trainers.torch.mesh import ProcessMesh
from trainer_contract.errors import SpecError, StateError
from trainer_contract.types import Head

MOMENTS: Final = ("step", "exp_avg", "exp_avg_sq")
#: Names of the directories of a whole model and of adapters inside a state.
MODEL: Final = "model"
ADAPTER: Final = "adapter"
#: Fields of config.json that do not affect what the model computes.
_INCIDENTAL: Final = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures", "use_cache")


#: Function that returns the rows to read of a parameter, given its number of rows.
RowsOf = Callable[[int], slice]
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


@dataclass(frozen=True, slots=True)
class RandomState:
    """The state of torch's generators: the CPU's, and CUDA's if available."""

    cpu: Tensor
    cuda: Tensor | None

    @classmethod
    def now(cls) -> Self:
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_available() else None)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)


@dataclass(frozen=True, slots=True)
class TorchSavedState:
    """A saved state that was read and checked; weights and shards are read later."""

    path: Path
    model_version: int
    tensors: Mapping[str, Tensor]
    lora: Mapping[str, Any] | None
    shards: ShardFiles | None
    #: Number of parameters that the optimizer had stepped. Others have no moments, because no pass uses them.
    stepped: int

    def check_kind(self, *, has_adapters: bool) -> None:
        if has_adapters and self.lora is None:
            raise StateError(
                f"the trainer state in {self.path} is of a model that was trained whole; leave trainer.options.lora out"
            )
        if not has_adapters and self.lora is not None:
            raise StateError(
                f"the trainer state in {self.path} is of LoRA adapters; resume with trainer.options.lora = "
                f"{_options_of(self.lora)}"
            )

    def check_adapters(self, expected: Mapping[str, Any]) -> None:
        assert self.lora is not None, "`check_kind` comes first"
        if self.lora.get("base") != expected["base"]:
            raise StateError(
                f"the LoRA adapters in {self.path} are of another base than the weights in model.path; resume from the "
                "model directory that the run started with"
            )
        if self.lora != expected:
            raise StateError(
                f"the LoRA adapters in {self.path} are {_options_of(self.lora)}, but the recipe requests "
                f"{_options_of(expected)}; resume with the saved ones"
            )

    @property
    def random(self) -> RandomState:
        return RandomState(self.tensors["rng.cpu"], self.tensors.get("rng.cuda"))

    def moments(
        self, shapes: Mapping[str, torch.Size], rows_of: RowsOf = lambda length: slice(0, length)
    ) -> dict[str, dict[str, Tensor]]:
        """Return AdamW's state by parameter, the rows that `rows_of` selects; {} before the first step. Raises
        StateError.
        """
        if self.shards is not None:
            self.shards.check(shapes)
        restored: dict[str, dict[str, Tensor]] = {}
        for name, shape in shapes.items():
            rows = rows_of(shape[0])
            moments = {kind: self.tensors[f"{name}.{kind}"] for kind in MOMENTS if f"{name}.{kind}" in self.tensors}
            if not moments:
                continue  # the optimizer never stepped this parameter
            if self.shards is not None:
                moments |= {kind: self.shards.rows(name, kind, rows) for kind in MOMENTS[1:]}
            elif len(moments) < len(MOMENTS) or any(m.ndim and m.shape != shape for m in moments.values()):
                raise StateError(f"the optimizer state of {name!r} in {self.path} is incomplete")
            else:
                moments = {kind: each[rows] if each.ndim else each for kind, each in moments.items()}
            restored[name] = moments
        if len(restored) != self.stepped:
            raise StateError(
                f"{self.path} has optimizer state for {len(restored)} of {self.stepped} parameters; restore another "
                "checkpoint"
            )
        return restored


def save(
    path: Path,
    *,
    config: PreTrainedConfig,
    random: RandomState,
    head: Head,
    moments: Mapping[str, Mapping[str, Tensor]],
    model_version: int,
    lora: Mapping[str, Any] | None,
) -> None:
    """Complete the state in `path`, which has the weights, adapters or shards; with shards, `moments` has only step
    counts.
    """
    tensors = {"rng.cpu": random.cpu} | ({} if random.cuda is None else {"rng.cuda": random.cuda})
    for name, kinds in moments.items():
        tensors |= {f"{name}.{kind}": tensor.contiguous() for kind, tensor in kinds.items()}
    save_file(tensors, path / "optimizer.safetensors")
    further: dict[str, Any] = {"head": head, "stepped": len(moments)} | ({} if lora is None else {"lora": lora})
    write_record(path, model_version=model_version, architecture=_architecture(config), **further)


def load(path: Path, *, expected: PreTrainedConfig, head: Head) -> TorchSavedState:
    """Read a state, except its weights. Raises StateError if it is damaged or of another model or head."""
    record = read_record(path, architecture=_architecture(expected), model_type=expected.model_type)
    try:
        tensors = load_file(path / "optimizer.safetensors")
    except (OSError, SafetensorError) as error:
        raise damaged(path, error) from error
    if record.get("head") != head:
        raise StateError(f"the trainer state in {path} has the head {record.get('head')!r}, expected {str(head)!r}")
    lora, shards = record.get("lora"), ShardFiles.of(path)
    folder = MODEL if lora is None else ADAPTER
    if shards is None and head is Head.VALUE and not (path / folder / VALUE_HEAD_FILE).is_file():
        raise StateError(f"the trainer state in {path} lacks {folder}/{VALUE_HEAD_FILE}; restore another checkpoint")
    if "rng.cpu" not in tensors:
        raise StateError(f"the trainer state in {path} has no random state; restore another checkpoint")
    stepped = record.get("stepped", sum(name.endswith(".step") for name in tensors))
    return TorchSavedState(path, record["model_version"], tensors, lora, shards, stepped)


@contextmanager
def damage_is_state_error(saved: TorchSavedState | None) -> Iterator[None]:
    """Turn errors from loading a model into StateError if the model is part of a saved state, else SpecError."""
    try:
        yield
    except (SpecError, SafetensorError) as error:
        if saved is None:
            raise error if isinstance(error, SpecError) else SpecError(f"the weights are damaged: {error}") from error
        raise StateError(f"the model of a saved trainer state is damaged: {error}") from error


def _options_of(record: Mapping[str, Any]) -> str:
    names = ", ".join(f'"{name}"' for name in record.get("targets", ()))
    return f"{{ rank = {record.get('rank')}, alpha = {record.get('alpha'):g}, targets = [{names}] }}"


def _architecture(config: PreTrainedConfig) -> str:
    return architecture_of({name: value for name, value in config.to_dict().items() if name not in _INCIDENTAL})
