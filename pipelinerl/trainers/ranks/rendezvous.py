"""The rendezvous of a trainer's processes, first over our own connections and then in torch or JAX (`join`).

    rank 0                                          rank r
    listens at options.distributed.coordinator      connects, with retries, until the deadline
                                                    Hello(rank, processes, token)
    after all Hellos: Welcome(port)  ────────────▶
    join                                            join

If a process is missing, JAX's own rendezvous ends with a C++ trace, and torch's waits silently. Therefore no rank calls
`join` before all have connected. Within `timeout_s`, a clear error names a missing or rejected rank.
"""

from __future__ import annotations

import hmac
import json
import logging
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pipelinerl.system.machine import family_of, free_ports
from pipelinerl.trainers.option_table import table, whole
from pipelinerl.trainers.ranks.commands import Channel, Hello, Refused, Welcome, decode, encode
from trainer_contract.errors import RankError, SpecError

log = logging.getLogger("pipelinerl")

#: Maximum size in bytes of a message from a peer that has not yet proved that it knows the token.
_MOST_BYTES: Final = 4096
_RETRY_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Distributed:
    """The processes of one trainer. All use the same recipe; only `process` differs.

    Attributes:
        coordinator: host:port at which process 0 listens for the others.
        processes: the number of processes, including process 0.
        process: 0 for `pipelinerl trainer`, 1 and above for `pipelinerl trainer-rank`.
        token_file: file with {"token": …}, the same for all processes; required unless the coordinator's host is
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
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)

    @property
    def is_on_one_machine(self) -> bool:
        """True if the coordinator listens on loopback, so that no other machine can connect."""
        return self.coordinator.rpartition(":")[0] in _LOOPBACK


#: Function that joins this process with all others through the array library. Every process calls it with the same
#: options and port; rank 0's host listens at the port. Raises SpecError.
Join = Callable[[Distributed, int], None]


def gather_ranks(distributed: Distributed, join: Join) -> dict[int, Channel]:
    """On rank 0, wait for all other ranks, then call `join`; return channels by rank. Raises SpecError."""
    token, deadline = _token(distributed), time.monotonic() + distributed.timeout_s
    host, port = distributed.address
    try:
        listener = socket.create_server((host, port), family=family_of(host))
    except OSError as error:
        raise SpecError(
            f"options.distributed.coordinator: rank 0 cannot listen at {distributed.coordinator} ({error}); it must be "
            "an address of the host where `pipelinerl trainer` runs, and a free port"
        ) from error
    channels: dict[int, Channel] = {}
    with listener:
        while len(channels) < distributed.processes - 1:
            left_s = deadline - time.monotonic()
            listener.settimeout(max(left_s, _RETRY_S))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                for channel in channels.values():
                    channel.close()
                missing = sorted(set(range(1, distributed.processes)) - channels.keys())
                raise SpecError(
                    f"options.distributed: rank {', '.join(map(str, missing))} did not connect to "
                    f"{distributed.coordinator} within {distributed.timeout_s} s; start "
                    f"`pipelinerl trainer-rank --rank {missing[0]}` on its host"
                ) from None
            _admit(connection, channels, distributed, token)
    # The port is chosen as late as possible, because an outgoing connection could take it in the meantime.
    (meeting,) = free_ports(1, host)
    for channel in channels.values():
        channel.send(encode(Welcome(meeting)))
        channel.beat()
    join(distributed, meeting)
    return channels


def join_rank0(distributed: Distributed, join: Join) -> Channel:
    """On a rank above 0, connect, wait for `Welcome`, then call `join`; return the channel. Raises SpecError."""
    token, deadline = _token(distributed), time.monotonic() + distributed.timeout_s
    connection: socket.socket | None = None
    while connection is None:
        try:
            connection = socket.create_connection(distributed.address, timeout=distributed.silence_s)
        except OSError as error:
            if time.monotonic() > deadline:
                raise SpecError(
                    f"options.distributed: rank 0 does not answer at {distributed.coordinator} within "
                    f"{distributed.timeout_s} s ({error}); start `pipelinerl trainer` there"
                ) from error
            time.sleep(_RETRY_S)
    left_s = max(deadline - time.monotonic(), 1.0)  # until all ranks have arrived, rank 0 sends no heartbeats
    waiting = Channel(connection, peer="rank 0", silence_s=left_s)
    waiting.send(encode(Hello(distributed.process, distributed.processes, token)))
    try:
        answer = decode(waiting.receive(most_bytes=_MOST_BYTES))
    except RankError as error:
        waiting.close()
        raise SpecError(
            f"options.distributed: rank 0 did not admit rank {distributed.process}: {error}; see its log"
        ) from error
    if not isinstance(answer, Welcome):
        waiting.close()
        reason = answer.reason if isinstance(answer, Refused) else f"it sent {type(answer).__name__}"
        raise SpecError(f"options.distributed: rank 0 rejects rank {distributed.process}: {reason}")
    channel = Channel(connection, peer="rank 0", silence_s=distributed.silence_s)
    channel.beat()
    join(distributed, answer.port)
    return channel


def _admit(connection: socket.socket, channels: dict[int, Channel], distributed: Distributed, token: str) -> None:
    """Accept or reject a peer that has connected; a rejection is only logged, so the rendezvous continues."""
    channel = Channel(connection, peer="a rank that connects", silence_s=distributed.silence_s)
    try:
        hello = decode(channel.receive(most_bytes=_MOST_BYTES))
        if not isinstance(hello, Hello):
            raise RankError(f"it sent {type(hello).__name__}, expected Hello")
        reason = ""
        if not hmac.compare_digest(hello.token.encode(), token.encode()):
            reason = "its token differs from the one in token_file here; give all ranks the same file"
        elif hello.processes != distributed.processes or not 0 < hello.rank < distributed.processes:
            reason = (
                f"it is rank {hello.rank} of {hello.processes}, expected one of 1..{distributed.processes - 1} of "
                f"{distributed.processes}; give all ranks the same recipe"
            )
        elif hello.rank in channels:
            reason = f"rank {hello.rank} has joined already; give each process its own --rank"
        if reason:
            channel.send(encode(Refused(reason)))
            raise RankError(reason)
    except RankError as error:
        log.warning("rejected a process that tried to join as a rank of the trainer: %s", error)
        channel.close()
        return
    channels[hello.rank] = Channel(connection, peer=f"rank {hello.rank}", silence_s=distributed.silence_s)


def _token(distributed: Distributed) -> str:
    if distributed.token_file is None:
        return ""
    try:
        token = json.loads(Path(distributed.token_file).read_text())["token"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SpecError(
            f'options.distributed.token_file: {distributed.token_file} must hold {{"token": "…"}} ({error})'
        ) from error
    return str(token)


#: Names of the local host that other machines cannot connect to.
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")
_WHERE: Final = "options.distributed"


def read_distributed(value: Any, *, trainer: str, processes: int | None = None) -> Distributed:
    """Parse the table `distributed`; `processes` is the default of its entry `processes`. Raises SpecError."""
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
