"""`HeadNode`: the head's communication with the other nodes of a run.

| it waits for                      | how long                         | then                                   |
|-----------------------------------|----------------------------------|----------------------------------------|
| the next record of a running node | `SILENCE_S`                      | reports it as gone; the run continues  |
| nodes to stop, at the run's end   | `launch.grace_s`, and two beats  | names them, and stops its own share    |

A run on one machine has no other nodes and writes no records.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, final

from launch.cluster.membership import (
    BEAT_S,
    LaunchRecord,
    Members,
    NodeFile,
    NodeState,
    OtherNodes,
    ended,
    write_launch,
)
from launch.plan import Launch
from launch.supervisor import RunOutcome, RunResult, Supervisor
from pipelinerl.observability.status import RestartStatus, write_restarts

_LOOK_S: Final = 0.05


@final
class HeadNode:
    """The launcher's part that talks to the other nodes, made once the launcher has locked the run's directory.

    Args:
        members: the hosts of the run; None for a run on one machine.
    """

    def __init__(self, launch: Launch, members: Members | None, announce: Callable[[str], None]) -> None:
        self._launch = launch
        self._announce = announce
        self._restarts: tuple[RestartStatus, ...] = ()
        self._up: frozenset[str] = frozenset()
        self._looked_at = float("-inf")
        self._record: LaunchRecord | None = None
        if members is not None:
            # Each launch has a new token. Its digest identifies the launch without revealing the token.
            id = hashlib.sha256(launch.token_file.read_bytes()).hexdigest()[:16]
            self._record = LaunchRecord(id=id, members=members)
            self._own = NodeFile(launch.run_dir, launch.placement.head.name, id)
            self._others = OtherNodes(launch.run_dir, id, [host.name for host in members.hosts[1:]])

    @property
    def leads(self) -> bool:
        """True if the run has several hosts."""
        return self._record is not None

    def begin(self) -> None:
        """Tell the nodes that a launch is under way. Raises OSError."""
        if self._record is not None:
            write_launch(self._launch.run_dir, self._record)
            self._own.tell(NodeState.UP)
            for host in self._record.members.hosts[1:]:
                self._announce(
                    f"waiting for host {host.name}: pipelinerl node {self._launch.run_dir} --name {host.name}"
                )

    def follow(self, supervisor: Supervisor) -> None:
        """Report that the head is up, and read the other nodes' records; called on each tick of the supervisor."""
        now = time.monotonic()
        if self._record is None or now - self._looked_at < BEAT_S:
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
        """Write the restarts of this host's processes and of the processes on other nodes. Raises OSError."""
        self._restarts = restarts
        self._write_restarts()

    def end(self, result: RunResult) -> None:
        """Tell the nodes how the run ended, and wait for them to stop, because their processes need the head's
        streams.
        """
        if self._record is None:
            return
        with suppress(OSError):
            write_launch(self._launch.run_dir, ended(self._record, result))
        deadline = time.monotonic() + self._launch.config.launch.grace_s + 2 * BEAT_S
        self._others.read(time.monotonic())
        while (up := self._others.up(time.monotonic())) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            self._others.read(time.monotonic())
        if up:
            self._announce(f"{', '.join(sorted(up))} did not stop in time; stopping the head")
        self._own.tell(NodeState.ENDED)

    def _write_restarts(self) -> None:
        others = () if self._record is None else self._others.restarts()
        write_restarts(self._launch.run_dir, (*self._restarts, *others))
