"""`pipelinerl node`: run and supervise one host's share of the processes of a run on several hosts.

The head's node is the launcher itself, which runs its own share (`launch.run.resume`). Any other node does this:

| it waits for                           | how long                 | then                                          |
|----------------------------------------|--------------------------|-----------------------------------------------|
| a launch in progress (`launch.json`)   | `HEAD_S`                 | raises an error that says what to start       |
| health of the controller, on the head  | `launch.start_timeout_s` | fails the run; the error names the controller |
| a heartbeat of the head                | `HEAD_S`                 | stops its share                               |
| the result of the run, from the head   | –                        | stops its share; exits with the head's status |

A node serves one launch after another: if the head restarts, all nodes restart their processes with the new token. If a
node is killed, its processes end with it; a restarted node starts its processes again. SIGTERM stops the node's share
and lets a trainer save first, while the run continues.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from launch import run_directory
from launch.cluster import membership
from launch.placement import TRAINER
from launch.plan import processes_of
from launch.run import Connect, launch_on, prepare, resume
from launch.supervisor import RunOutcome, RunResult, Supervisor
from pipelinerl.config.recipe import RunConfig, load
from pipelinerl.errors import UserError

#: After this many seconds without a heartbeat of the head, a node assumes that the head will not come back.
HEAD_S: Final = 600.0
_LOOK_S: Final = 0.1
#: Seconds of waiting after which a node tells the user that it waits.
_SILENT_S: Final = 5.0


def run_node(
    run_dir: Path,
    name: str,
    members_of: Callable[[RunConfig], membership.Members | None],
    *,
    recipe: Path | None,
    claim: Callable[[RunConfig], bool],
    refuse: Callable[[RunConfig], None],
    connect: Connect,
) -> int:
    """Run the share of the host `name`, as the head of the run if it is the first host; return the exit status.

    `members_of` returns the hosts of the command line, if it names any. They replace the hosts that the run began with,
    because a scheduler may choose other hosts each time. If there is no run in `run_dir` yet, the head begins one there
    from `recipe`. The head checks the recipe with `refuse` before it makes or starts anything.

    Raises:
        UserError: the run has no such host, its share cannot run, or the recipe is refused.
    """
    if recipe is not None and not (run_dir / "recipe.toml").is_file():
        config = load(recipe).changed("run", directory=run_dir.parent, name=run_dir.name)
        given = members_of(config)
        if given is not None and given.hosts[0].name == name:
            if run_dir.exists():
                raise UserError(
                    f"{run_dir} exists, and holds no run: expected {run_dir / 'recipe.toml'} or nothing; move it away"
                )
            refuse(config)
            prepare(config, claim=claim, members=given)
            return resume(run_dir, connect=connect)
    members = membership.read_members(run_dir)
    if (run_dir / "recipe.toml").is_file():
        given = members_of(run_directory.open_run(run_dir).config)
        if given is not None and given.hosts[0].name == name:
            membership.write_members(run_dir, given)
        members = given or members
    if members is not None and members.hosts[0].name == name:
        refuse(run_directory.open_run(run_dir).config)
        return resume(run_dir, connect=connect)
    return serve_share(run_dir, name)


def serve_share(run_dir: Path, host: str, *, announce: Callable[[str], None] = print, head_s: float = HEAD_S) -> int:
    """Run the processes of `host` until the run is over; return the head's status. `UserError` if it cannot serve."""
    record = _await_launch(run_dir, host, announce, head_s)
    with _claimed(run_dir, host):
        while True:
            if record.result is not None:
                announce(f"the run is over: {record.result.outcome}")
                return record.result.exit_status
            share = _Share(run_dir.resolve(), host, record, announce, head_s)
            result = share.serve()
            if not share.superseded:
                announce(f"{result.outcome}: {result.message}")
                return result.exit_status
            announce("the head began another launch; following it")
            record = _await_launch(run_dir, host, announce, head_s)


class _Share:
    """The processes of one host in one launch (one start of the run by the head)."""

    def __init__(
        self, run_dir: Path, host: str, record: membership.LaunchRecord, announce: Callable[[str], None], head_s: float
    ) -> None:
        self._run_dir = run_dir
        self._host = host
        self._record = record
        self._head_s = head_s
        self._file = membership.NodeFile(run_dir, host, record.id)
        self._head = membership.OtherNodes(run_dir, record.id, [record.members.hosts[0].name])
        self._began_at = time.monotonic()
        self._looked_at = float("-inf")
        self._result: RunResult | None = None
        self.superseded = False
        directory = run_directory.open_run(run_dir)
        launch = launch_on(record.members, host, directory)
        own, section = processes_of(launch).of_host(host), directory.config.launch

        def end(result: RunResult) -> None:
            # A failure ends the whole run, so report it to the head before anything is stopped here.
            if self._result is None and result.outcome is RunOutcome.FAILED:
                self._file.tell(membership.NodeState.FAILED, result.message)

        trains = any(spec.name == TRAINER for spec in own.specs)
        self._supervisor = Supervisor(
            own,
            run_dir,
            start_timeout_s=section.start_timeout_s,
            grace_s=max(section.grace_s, section.save_s) if trains else section.grace_s,
            announce=announce,
            on_tick=self._follow,
            on_end=end,
            tell_restarts=self._file.tell_restarts,
        )

    def serve(self) -> RunResult:
        """Run the host's processes until they have ended or failed, or until the head ends or replaces the launch."""
        self._file.tell(membership.NodeState.UP)
        result = self._supervisor.run()
        if result.outcome is not RunOutcome.FAILED or self._result is not None:
            self._file.tell(membership.NodeState.LEFT if self._result is None else membership.NodeState.ENDED)
        return result

    def _follow(self) -> None:
        now = time.monotonic()
        if now - self._looked_at < membership.BEAT_S / 4:
            return
        self._looked_at = now
        self._file.beat()
        self._head.read(now)
        record = membership.read_launch(self._run_dir)
        if record is not None and record.id != self._record.id:
            self.superseded = True
            self._end_with(RunResult(RunOutcome.STOPPED, "the head began another launch"))
        elif record is not None and record.result is not None:
            self._end_with(record.result)
        elif now - max((last.at for last in self._head.heartbeats.values()), default=self._began_at) > self._head_s:
            head = self._record.members.hosts[0].name
            words = f"host {head}, the head, sent no heartbeat for {self._head_s:g} s; restart its node"
            self._end_with(RunResult(RunOutcome.FAILED, words))

    def _end_with(self, result: RunResult) -> None:
        self._result = result
        self._supervisor.end(result.outcome, result.message)


def _await_launch(run_dir: Path, host: str, announce: Callable[[str], None], head_s: float) -> membership.LaunchRecord:
    """Wait for a launch that is under way or completed, and return its record; ignore failed and stopped ones."""
    began = time.monotonic()
    deadline, tell_at = began + head_s, began + _SILENT_S
    while True:
        if time.monotonic() >= tell_at:
            announce(f"host {host} waits for a launch of the run in {run_dir}, {head_s:g} s at most")
            tell_at = deadline
        record = membership.read_launch(run_dir)
        if record is not None and (record.result is None or record.result.outcome is RunOutcome.COMPLETED):
            return record
        if time.monotonic() > deadline:
            raise UserError(
                f"host {host} waited {head_s:g} s for a launch of the run in {run_dir}; start the node of the head "
                f"(pipelinerl run --resume {run_dir}), and see that both hosts have that directory"
            )
        time.sleep(_LOOK_S)


@contextmanager
def _claimed(run_dir: Path, host: str) -> Iterator[None]:
    """Lock the host's name in the run, so that only one node serves it."""
    lock = FileLock(membership.folder_of(run_dir) / f"node-{host}.lock", timeout=0, mode=0o600, fallback_to_soft=False)
    try:
        held = lock.acquire()
    except Timeout:
        raise UserError(f"another node serves host {host} of the run in {run_dir}; end it first") from None
    with held:
        yield
