"""What the nodes of a run tell each other, as files in the run's directory, which all of them see.

    cluster/hosts.json     the hosts of the run and the first of its ports, as it was begun with
    cluster/launch.json    written by the head: which launch is under way, its hosts and ports, and how it ended
    cluster/node-b.json    written by the node of host b: the launch that it serves, a counter that grows, how it is

A file is replaced whole, and has one writer. No clock is compared: a node is silent when its file has not changed for
a while on the reader's own clock, which bears file systems that show changes after seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, final

import msgspec

from launch.hosts import Host
from launch.supervisor import RunOutcome, RunResult
from pipelinerl.errors import UserError
from pipelinerl.observability.status import RestartStatus
from pipelinerl.system.files import write_private

#: A node writes that often that it is there.
BEAT_S: Final = 1.0
#: A node of which nothing has come for so long is lost, or its file system is.
SILENCE_S: Final = 20.0
#: Ports of a run on several hosts begin here, below those of outgoing connections, unless its user says otherwise.
FIRST_PORT: Final = 20000


class NodeState(StrEnum):
    """What a node says of itself."""

    UP = "up"
    FAILED = "failed"
    """One of its processes is beyond help, and with it the run."""
    LEFT = "left"
    """It was told to stop, while the run goes on."""
    ENDED = "ended"
    """It has stopped its share, since the run is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The hosts of a run, the head first, and the first of the ports that its services take."""

    hosts: tuple[Host, ...]
    first_port: int = FIRST_PORT


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """What the head says: `id` is this launch's; `result` is None while it is under way."""

    id: str
    members: Members
    result: RunResult | None = None


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says: the launch that it serves, how it is, whose deaths it has seen; `beat` changes each time."""

    launch: str
    beat: int
    state: NodeState
    message: str = ""
    restarts: tuple[RestartStatus, ...] = ()


def write_members(run_dir: Path, members: Members) -> None:
    """Note, in the directory of a run that begins, on which hosts it is to be. Raises OSError."""
    folder_of(run_dir).mkdir(exist_ok=True)
    write_private(folder_of(run_dir) / "hosts.json", json.dumps(_members_json(members), indent=1))


def read_members(run_dir: Path) -> Members | None:
    """The hosts that a run was begun with; None for a run of one machine.

    Raises:
        UserError: the file is damaged.
    """
    path = folder_of(run_dir) / "hosts.json"
    try:
        return _members_of(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}; name the hosts anew by --host") from None


def write_launch(run_dir: Path, record: LaunchRecord) -> None:
    """Tell the nodes. Raises OSError."""
    result = None if record.result is None else [str(record.result.outcome), record.result.message]
    table = {"id": record.id, **_members_json(record.members), "result": result}
    folder_of(run_dir).mkdir(exist_ok=True)
    write_private(folder_of(run_dir) / "launch.json", json.dumps(table, indent=1))


def read_launch(run_dir: Path) -> LaunchRecord | None:
    """What the head says; None while it says nothing that can be read."""
    try:
        table = json.loads((folder_of(run_dir) / "launch.json").read_text())
        result = table["result"] and RunResult(RunOutcome(table["result"][0]), str(table["result"][1]))
        return LaunchRecord(id=str(table["id"]), members=_members_of(table), result=result)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def folder_of(run_dir: Path) -> Path:
    """The folder of these files."""
    return run_dir / "cluster"


def _members_json(members: Members) -> dict[str, Any]:
    return {"hosts": [host.to_json() for host in members.hosts], "first_port": members.first_port}


def _members_of(table: Any) -> Members:
    hosts = tuple(Host.from_json(host) for host in table["hosts"])
    if not hosts:
        raise ValueError("it names no host")
    return Members(hosts=hosts, first_port=int(table["first_port"]))


@final
class NodeFile:
    """What one node says of itself; what cannot be written, for want of room, say, is written with the next beat."""

    def __init__(self, run_dir: Path, host: str, launch: str) -> None:
        self._path = node_path(run_dir, host)
        self._record = NodeRecord(launch=launch, beat=time.time_ns(), state=NodeState.UP)
        self._written_at = float("-inf")

    def beat(self) -> None:
        """Say that the node is there, if it has not just done so."""
        if time.monotonic() - self._written_at >= BEAT_S:
            self._write()

    def tell_restarts(self, restarts: tuple[RestartStatus, ...]) -> None:
        """Say which of its processes have died."""
        self._record = msgspec.structs.replace(self._record, restarts=restarts)
        self._write()

    def tell(self, state: NodeState, message: str = "") -> None:
        """Say how the node is, at once."""
        self._record = msgspec.structs.replace(self._record, state=state, message=message)
        self._write()

    def _write(self) -> None:
        self._record = msgspec.structs.replace(self._record, beat=self._record.beat + 1)
        self._written_at = time.monotonic()
        with suppress(OSError):
            write_private(self._path, msgspec.json.encode(self._record).decode())


def node_path(run_dir: Path, host: str) -> Path:
    """The file in which the node of a host says how it is."""
    return folder_of(run_dir) / f"node-{host}.json"


@dataclass(frozen=True, slots=True)
class LastHeartbeat:
    """The newest record of a node, and when this process saw it change."""

    record: NodeRecord
    at: float


@final
@dataclass(slots=True)
class OtherNodes:
    """What the head knows of the other nodes of its launch."""

    run_dir: Path
    launch: str
    hosts: Sequence[str]
    heard: dict[str, LastHeartbeat] = field(default_factory=dict)

    def read(self, now: float) -> None:
        """Look into their files."""
        for host in self.hosts:
            try:
                record = msgspec.json.decode(node_path(self.run_dir, host).read_bytes(), type=NodeRecord)
            except (OSError, msgspec.MsgspecError):
                continue
            if record.launch == self.launch and (host not in self.heard or self.heard[host].record != record):
                self.heard[host] = LastHeartbeat(record, now)

    def up(self, now: float) -> frozenset[str]:
        """Hosts whose nodes serve this launch, and were heard of a moment ago."""
        return frozenset(
            host
            for host, heard in self.heard.items()
            if heard.record.state is NodeState.UP and now - heard.at <= SILENCE_S
        )

    def failure(self) -> str | None:
        """Why a node says that the run cannot go on; None while none does."""
        for host, heard in self.heard.items():
            if heard.record.state is NodeState.FAILED:
                return f"on host {host}: {heard.record.message}"
        return None

    def restarts(self) -> tuple[RestartStatus, ...]:
        """Those of their processes that have died."""
        return tuple(each for heard in self.heard.values() for each in heard.record.restarts)


def ended(record: LaunchRecord, result: RunResult) -> LaunchRecord:
    """The same launch, which is over."""
    return replace(record, result=result)
