"""`JaxOptions`: what a recipe's `trainer.options` may say to the JAX trainer, read without guessing.

[trainer]
type = "jax"
options.mesh = { data = 2, fsdp = 4, tensor = 2 }
options.remat = "inference_matched"
options.distributed = { coordinator = "host-0:8476", processes = 4, process = 0 }
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final

from pipelinerl.trainers.jax.mesh import MeshShape
from trainer_contract.errors import SpecError


class Remat(StrEnum):
    """What the forward pass keeps for the backward pass; the rest is computed again."""

    NONE = "none"
    """Everything is kept: fastest where it fits."""
    MATMULS = "matmuls"
    """Results of the linear layers are kept, those of attention and of pointwise operations are not."""
    INFERENCE_MATCHED = "inference_matched"
    """Only each layer's output is kept ("nothing saveable", RLAX §5.1): the forward pass emits no residuals that would
    keep XLA from fusing it as it fuses an inference forward, so that its log-probs are those of `forward`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributed:
    """Arguments of `jax.distributed.initialize`; all None on a TPU pod or under Slurm, where jax finds them itself."""

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JaxOptions:
    """`distributed` None is one host."""

    mesh: MeshShape
    remat: Remat = Remat.NONE
    distributed: Distributed | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any], *, gradient_checkpointing: bool) -> JaxOptions:
        """Read `TrainerSpec.options`; `gradient_checkpointing` chooses `inference_matched` unless `remat` is given.

        Raises:
            SpecError: an unknown key, or a value of another kind than expected.
        """
        _refuse_unknown(options, [field.name for field in fields(cls)], "options")
        remat = options.get("remat", Remat.INFERENCE_MATCHED if gradient_checkpointing else Remat.NONE)
        if remat not in list(Remat):
            raise SpecError(f"options.remat must be one of {', '.join(Remat)}, got {remat!r}")
        mesh = _table(options.get("mesh", {}), MeshShape, "options.mesh")
        distributed = options.get("distributed")
        return cls(
            mesh=MeshShape(**{name: _whole(value, f"options.mesh.{name}", least=1) for name, value in mesh.items()}),
            remat=Remat(remat),
            distributed=None if distributed is None else _distributed(distributed),
        )


def _distributed(given: Any) -> Distributed:
    where: Final = "options.distributed"
    table = _table(given, Distributed, where)
    coordinator = table.get("coordinator")
    if coordinator is not None and not isinstance(coordinator, str):
        raise SpecError(f"{where}.coordinator must be host:port, got {coordinator!r}")
    numbers = {name: _whole(table[name], f"{where}.{name}", least=0) for name in table if name != "coordinator"}
    return Distributed(coordinator=coordinator, **numbers)


def _table(value: Any, kind: type[Any], where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise SpecError(f"{where} must be a table, got {value!r}")
    _refuse_unknown(value, [field.name for field in fields(kind)], where)
    return value


def _refuse_unknown(table: Mapping[str, Any], known: list[str], where: str) -> None:
    for name in table:
        if name not in known:
            raise SpecError(f"{where}.{name} is unknown to the JAX trainer; it knows {', '.join(known)}")


def _whole(value: Any, where: str, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SpecError(f"{where} must be a whole number of at least {least}, got {value!r}")
    return value
