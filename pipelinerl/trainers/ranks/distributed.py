"""`Distributed`, the recipe's `trainer.options.distributed`: the processes of one trainer and their meeting point.

options.distributed = { coordinator = "10.0.0.1:8476", processes = 4, token_file = "/shared/token" }
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipelinerl.trainers.option_table import table, whole
from trainer_contract.errors import SpecError

#: Hosts that other machines cannot connect to.
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
_WHERE: Final = "options.distributed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributed:
    """The processes of one trainer. All use the same recipe; only `process` differs.

    Attributes:
        coordinator: host:port at which process 0 listens for the others; the host is an address of process 0.
        processes: the number of processes, including process 0.
        process: 0 for `pipelinerl trainer`, 1 and above for `pipelinerl trainer-rank`.
        token_file: file with {"token": …}, the same token for all processes; required unless the coordinator's host is
            loopback.
        timeout_s: the longest duration of a method call, compilation included, and of the initial rendezvous.
        silence_s: a process that sends nothing for this long counts as lost.
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

    @property
    def is_on_one_machine(self) -> bool:
        """True if no other machine can connect."""
        return self.coordinator.rpartition(":")[0] in _LOOPBACK


def read_distributed(value: Any, *, trainer: str, processes: int | None = None) -> Distributed:
    """Parse the table; `processes` may be omitted from the table if it is passed here.

    Raises:
        SpecError: an unknown key, a value of the wrong type, or a number of processes that contradicts `processes`.
    """
    options: Mapping[str, Any] = table(value, Distributed, _WHERE, trainer=trainer)
    if processes is not None:
        options = {"processes": processes, **options}
    if missing := [name for name in ("coordinator", "processes") if name not in options]:
        raise SpecError(
            f'{_WHERE} must have {" and ".join(missing)}, as in {{ coordinator = "10.0.0.1:8476", processes = 2 }}'
        )
    coordinator, token_file = options["coordinator"], options.get("token_file")
    host, _, port = coordinator.rpartition(":") if isinstance(coordinator, str) else ("", "", "")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise SpecError(f"{_WHERE}.coordinator must be host:port, got {coordinator!r}")
    if token_file is not None and not isinstance(token_file, str):
        raise SpecError(f"{_WHERE}.token_file must be a path, got {token_file!r}")
    least = {"processes": 2, "process": 0, "timeout_s": 1, "silence_s": 1}
    numbers = {name: whole(options[name], f"{_WHERE}.{name}", least=least[name]) for name in least if name in options}
    distributed = Distributed(coordinator=coordinator, token_file=token_file, **numbers)
    if distributed.process >= distributed.processes:
        raise SpecError(f"{_WHERE}.process must be below processes={distributed.processes}, got {distributed.process}")
    if processes not in (None, distributed.processes):
        raise SpecError(f"{_WHERE}.processes must be {processes}, as options.mesh says, got {distributed.processes}")
    if token_file is None and not distributed.is_on_one_machine:
        raise SpecError(f"{_WHERE}.token_file must be given where coordinator is not loopback, got {coordinator!r}")
    return distributed
