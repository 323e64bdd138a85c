"""`JaxOptions`: what a recipe's `trainer.options` may say to the JAX trainer, read without guessing.

[trainer]
type = "jax"
options.mesh = { data = 2, fsdp = 4, tensor = 2 }
options.remat = "inference_matched"
options.distributed = { coordinator = "10.0.0.1:8476", processes = 4, token_file = "/shared/token" }
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final

from pipelinerl.trainers.jax.mesh import MeshShape
from trainer_contract.errors import SpecError

#: Hosts at which nobody from elsewhere can connect.
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")


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
    """Several processes behind one trainer. The recipe is the same for all; `process` is each one's own.

    Attributes:
        coordinator: host:port at which process 0 listens for the others; the host is an address of process 0.
        processes: how many, process 0 included.
        process: 0 for `pipelinerl trainer`, 1 and above for `pipelinerl trainer-rank`.
        token_file: {"token": …}, the same for all; must be given unless the coordinator's host is loopback.
        timeout_s: a verb, compilation included, or the meeting at the start may take so long.
        silence_s: a process of which nothing is heard for so long is lost.
    """

    coordinator: str
    processes: int
    process: int = 0
    token_file: str | None = None
    timeout_s: int = 1800
    silence_s: int = 60

    @property
    def address(self) -> tuple[str, int]:
        """Host and port of the coordinator."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


@dataclass(frozen=True, slots=True, kw_only=True)
class JaxOptions:
    """`distributed` None is one process."""

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


def _distributed(value: Any) -> Distributed:
    where: Final = "options.distributed"
    table = _table(value, Distributed, where)
    if missing := [name for name in ("coordinator", "processes") if name not in table]:
        raise SpecError(
            f'{where} must have {" and ".join(missing)}, as in {{ coordinator = "10.0.0.1:8476", processes = 2 }}'
        )
    coordinator, token_file = table["coordinator"], table.get("token_file")
    host, _, port = coordinator.rpartition(":") if isinstance(coordinator, str) else ("", "", "")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SpecError(f"{where}.coordinator must be host:port, got {coordinator!r}")
    if token_file is not None and not isinstance(token_file, str):
        raise SpecError(f"{where}.token_file must be a path, got {token_file!r}")
    least = {"processes": 2, "process": 0, "timeout_s": 1, "silence_s": 1}
    numbers = {name: _whole(table[name], f"{where}.{name}", least=least[name]) for name in least if name in table}
    distributed = Distributed(coordinator=coordinator, token_file=token_file, **numbers)
    if distributed.process >= distributed.processes:
        raise SpecError(f"{where}.process must be below processes={distributed.processes}, got {distributed.process}")
    if token_file is None and host not in _LOOPBACK:
        raise SpecError(f"{where}.token_file must be given where coordinator is not loopback, got {coordinator!r}")
    return distributed


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
