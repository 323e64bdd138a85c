"""Messages between the nodes of a run, as files in the run's directory, which all nodes see.

The head is the node of the first host. A launch is one start of the run's processes, by the head.

    cluster/hosts.json     the hosts with which the run began, and the number of its first port
    cluster/launch.json    written by the head: the current launch, its hosts and ports, and how it ended
    cluster/node-b.json    written by the node of host b: the launch that it serves, a growing counter, its state

Each file has one writer and is replaced as a whole. Clocks of different hosts are never compared: a node is silent if
its file has not changed for a while by the reader's own clock. File systems may show changes with seconds of delay.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec

from launch.hosts import Host
from launch.plan import Launch
from launch.supervisor import RunOutcome, RunResult, Supervisor
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import UserError
from pipelinerl.observability.status import RestartStatus, write_restarts
from pipelinerl.system.files import write_private

#: Seconds between two heartbeats of a node.
BEAT_S: Final = 1.0
#: After this many seconds without a heartbeat, a node (or its file system) counts as lost.
SILENCE_S: Final = 20.0
#: Default for the first port of a run on several hosts; outgoing connections use a higher range of ports.
FIRST_PORT: Final = 20000


class NodeState(StrEnum):
    """The state of a node, as the node reports it."""

    UP = "up"
    FAILED = "failed"
    """One of the node's processes failed for good, which ends the whole run."""
    LEFT = "left"
    """The node was stopped while the run continues."""
    ENDED = "ended"
    """The node stopped its processes, because the run is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The hosts of a run, the head first, and the first of the consecutive ports that the run uses."""

    hosts: tuple[Host, ...]
    first_port: int = FIRST_PORT

    def launch(self, config: RunConfig, run_dir: Path, *, cores: Sequence[int] = ()) -> Launch:
        """Return the `Launch` of a run on these hosts; raise `RecipeError` if they cannot hold the run's processes."""
        return Launch.on(self.hosts, config, run_dir=run_dir, ports=count(self.first_port), cores=cores)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """The head's record of a launch (one start of the run): id, hosts, and the run's result (None until it ends)."""

    id: str
    members: Members
    result: RunResult | None = None


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A node's record: id of its launch, the node's state, its processes' restarts, and a count of writes (`beat`)."""

    launch: str
    beat: int
    state: NodeState
    message: str = ""
    restarts: tuple[RestartStatus, ...] = ()


def write_members(run_dir: Path, members: Members) -> None:
    """Record the hosts of a run that begins; may raise OSError."""
    _write_table(run_dir, "hosts.json", _members_json(members))


def read_members(run_dir: Path) -> Members | None:
    """Return the hosts of a run, or None if it has only this machine; raise `UserError` if the file is damaged."""
    path = folder_of(run_dir) / "hosts.json"
    try:
        return _members_of(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read: {error}; pass the hosts again with --node") from None


def write_launch(run_dir: Path, record: LaunchRecord) -> None:
    """Write the head's record; may raise OSError."""
    result = None if record.result is None else [str(record.result.outcome), record.result.message]
    _write_table(run_dir, "launch.json", {"id": record.id, **_members_json(record.members), "result": result})


def read_launch(run_dir: Path) -> LaunchRecord | None:
    """Return the head's record; None if there is no readable record."""
    try:
        table = json.loads((folder_of(run_dir) / "launch.json").read_text())
        result = table["result"] and RunResult(RunOutcome(table["result"][0]), str(table["result"][1]))
        return LaunchRecord(id=str(table["id"]), members=_members_of(table), result=result)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def folder_of(run_dir: Path) -> Path:
    """Return the folder of the nodes' files."""
    return run_dir / "cluster"


def _write_table(run_dir: Path, name: str, table: dict[str, Any]) -> None:
    folder_of(run_dir).mkdir(exist_ok=True)
    write_private(folder_of(run_dir) / name, json.dumps(table, indent=1))


def _members_json(members: Members) -> dict[str, Any]:
    return {"hosts": [host.to_json() for host in members.hosts], "first_port": members.first_port}


def _members_of(table: Any) -> Members:
    hosts = tuple(Host.from_json(host) for host in table["hosts"])
    if not hosts:
        raise ValueError("it names no host")
    return Members(hosts=hosts, first_port=int(table["first_port"]))


class NodeFile:
    """Writes one node's record; if a write fails, the next heartbeat repeats it."""

    def __init__(self, run_dir: Path, host: str, launch: str) -> None:
        self._path = node_path(run_dir, host)
        self._record = NodeRecord(launch=launch, beat=time.time_ns(), state=NodeState.UP)
        self._written_at = float("-inf")

    def beat(self) -> None:
        """Write a heartbeat, unless the record was written less than `BEAT_S` ago."""
        if time.monotonic() - self._written_at >= BEAT_S:
            self._write()

    def tell_restarts(self, restarts: tuple[RestartStatus, ...]) -> None:
        """Report the restarts of the node's processes."""
        self._record = msgspec.structs.replace(self._record, restarts=restarts)
        self._write()

    def tell(self, state: NodeState, message: str = "") -> None:
        """Report the node's state immediately, without waiting for the next heartbeat."""
        self._record = msgspec.structs.replace(self._record, state=state, message=message)
        self._write()

    def _write(self) -> None:
        self._record = msgspec.structs.replace(self._record, beat=self._record.beat + 1)
        self._written_at = time.monotonic()
        with suppress(OSError):
            write_private(self._path, msgspec.json.encode(self._record).decode())


def node_path(run_dir: Path, host: str) -> Path:
    """Return the path of a node's record."""
    return folder_of(run_dir) / f"node-{host}.json"


@dataclass(frozen=True, slots=True)
class LastHeartbeat:
    """The newest record of a node, and the time at which it was first read, by the reader's own clock."""

    record: NodeRecord
    at: float


@dataclass(slots=True)
class OtherNodes:
    """The records of other nodes of a launch, as last read from their files."""

    run_dir: Path
    launch: str
    hosts: Sequence[str]
    heartbeats: dict[str, LastHeartbeat] = field(default_factory=dict)

    def read(self, now: float) -> None:
        """Read what the other nodes have written to their membership files."""
        for host in self.hosts:
            try:
                record = msgspec.json.decode(node_path(self.run_dir, host).read_bytes(), type=NodeRecord)
            except (OSError, msgspec.MsgspecError):
                continue
            if record.launch == self.launch and (host not in self.heartbeats or self.heartbeats[host].record != record):
                self.heartbeats[host] = LastHeartbeat(record, now)

    def up(self, now: float) -> frozenset[str]:
        """Return the hosts whose nodes serve this launch and sent a heartbeat recently."""
        return frozenset(
            host
            for host, last in self.heartbeats.items()
            if last.record.state is NodeState.UP and now - last.at <= SILENCE_S
        )

    def failure(self) -> str | None:
        """Return the error message of a node that reports a failure of the run; None if no node reports one."""
        for host, last in self.heartbeats.items():
            if last.record.state is NodeState.FAILED:
                return f"on host {host}: {last.record.message}"
        return None

    def restarts(self) -> tuple[RestartStatus, ...]:
        return tuple(each for last in self.heartbeats.values() for each in last.record.restarts)


_LOOK_S: Final = 0.05


class HeadNode:
    """The head's communication with the other nodes; created after the launcher has locked the run's directory."""

    def __init__(self, launch: Launch, members: Members, announce: Callable[[str], None]) -> None:
        self._launch = launch
        self._announce = announce
        self._restarts: tuple[RestartStatus, ...] = ()
        self._up: frozenset[str] = frozenset()
        self._looked_at = float("-inf")
        # Each launch has a new token. Its digest identifies the launch without revealing the token.
        id = hashlib.sha256(launch.token_file.read_bytes()).hexdigest()[:16]
        self._record = LaunchRecord(id=id, members=members)
        self._own = NodeFile(launch.run_dir, launch.placement.head.name, id)
        self._others = OtherNodes(launch.run_dir, id, [host.name for host in members.hosts[1:]])

    def begin(self) -> None:
        """Tell the nodes that a launch is under way; may raise OSError."""
        write_launch(self._launch.run_dir, self._record)
        self._own.tell(NodeState.UP)
        for host in self._record.members.hosts[1:]:
            self._announce(f"waiting for host {host.name}: pipelinerl node {self._launch.run_dir} --name {host.name}")

    def follow(self, supervisor: Supervisor) -> None:
        """Report that the head is up, and read the other nodes' records; called on each tick of the supervisor."""
        now = time.monotonic()
        if now - self._looked_at < BEAT_S:
            return
        self._looked_at = now
        self._own.beat()
        before = self._others.restarts()
        self._others.read(now)
        up = self._others.up(now)
        for host in sorted(up - self._up):
            self._announce(f"host {host} is up")
        for host in sorted(self._up - up):
            self._announce(f"host {host} is gone; the run continues, and waits for it if it needs it")
        self._up = up
        if self._others.restarts() != before:
            with suppress(OSError):
                self._write_restarts()
        if (failure := self._others.failure()) is not None:
            supervisor.end(RunOutcome.FAILED, failure)

    def tell_restarts(self, restarts: tuple[RestartStatus, ...]) -> None:
        """Write the restarts of the head's own processes, together with those of other hosts; may raise OSError."""
        self._restarts = restarts
        self._write_restarts()

    def end(self, result: RunResult) -> None:
        """Tell the nodes how the run ended, and wait until they stop: their processes still need the head's streams."""
        with suppress(OSError):
            write_launch(self._launch.run_dir, replace(self._record, result=result))
        deadline = time.monotonic() + self._launch.config.launch.grace_s + 2 * BEAT_S
        self._others.read(time.monotonic())
        while (up := self._others.up(time.monotonic())) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            self._others.read(time.monotonic())
        if up:
            self._announce(f"{', '.join(sorted(up))} did not stop in time; stopping the head")
        self._own.tell(NodeState.ENDED)

    def _write_restarts(self) -> None:
        write_restarts(self._launch.run_dir, (*self._restarts, *self._others.restarts()))
