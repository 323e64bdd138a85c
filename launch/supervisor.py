"""The supervisor: runs a plan on this machine until it completes, fails or is stopped.

| state       | waits for                                       | deadline          | next (at the deadline, if any) |
|-------------|-------------------------------------------------|-------------------|--------------------------------|
| waiting     | health of the processes it starts after         | none of its own   | starting                       |
| waiting     | health of such processes on other hosts         | `start_timeout_s` | fails the run; names a process |
| starting    | its health check                                | `start_timeout_s` | fails the run, showing its log |
| healthy     | its exit                                        | –                 | what `OnExit` says, or failure |
| backing off | ½, 1, 2, 4, … seconds (`RestartBudget`)         | –                 | starting                       |
| saving      | the end of the run, which was asked to suspend  | `save_s`          | stopping                       |
| stopping    | exit after SIGTERM, by `stop_order`             | `grace_s` each    | SIGKILL to the group           |

When a process of a group dies, the others of the group are killed and all are restarted together. The set of processes
may change while the run is up: `add` starts a process, `stop_engine` stops one for good.

No process of the run outlives the supervisor, however it ends (see `supervised_process` and `reaper`). Ctrl-C or
SIGTERM suspends the run: it saves its state and stops in order. A second signal kills the run immediately. The result
says what happened and how to resume. The supervisor must run in the main thread: signals arrive there, and the kernel
ties child processes to the thread that started them.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import IO

from launch.placement import ROUNDING, Assignment
from launch.plan import Launch, Plan, ProcessSpec
from launch.process import Process, State, answers, exit_words
from pipelinerl.observability.status import RequestedEngine, RestartStatus, RunStatus, write_restarts
from pipelinerl.observability.usage import Usage, read_usage, write_usage
from pipelinerl.roles.role import OnExit
from pipelinerl.system.machine import free_ports

_REAPER = Path(__file__).with_name("reaper.py")
_TICK_S = 0.02
_PROBE_EVERY_S = 0.1
_USAGE_EVERY_S = 10.0
#: Exit status of a user error, which a restart cannot fix.
_USER_ERROR = 2


class RunOutcome(StrEnum):
    """The outcome of a run, as its launcher sees it."""

    COMPLETED = "completed"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class RunResult:
    """The end of a run: how it ended, and a message that a user can act on."""

    outcome: RunOutcome
    message: str

    @property
    def exit_status(self) -> int:
        """0 if completed, 1 if failed, 130 if stopped by the user."""
        return {RunOutcome.COMPLETED: 0, RunOutcome.FAILED: 1, RunOutcome.STOPPED: 130}[self.outcome]


class Supervisor:
    """Runs one plan once; logs go to `logs/` in the run's directory.

    Args:
        start_timeout_s: deadline for each process to become healthy.
        grace_s: deadline for each stage of processes to stop.
        save_s: deadline for the run to end after it was asked to suspend.
        suspend: asks the run, after Ctrl-C or SIGTERM, to save its state and end; returns whether the request arrived.
        announce: receives sentences for the user (deaths, restarts, stopping).
        on_tick: called about every `tick_every_s` while the run is up; must return quickly.
        on_end: receives the result before anything is stopped.
        tell_restarts: receives the restarts of all processes, at the start and after each change; may raise OSError.
    """

    def __init__(
        self,
        plan: Plan,
        run_dir: Path,
        *,
        start_timeout_s: float = 120.0,
        grace_s: float = 5.0,
        save_s: float = 30.0,
        suspend: Callable[[], bool] = lambda: False,
        announce: Callable[[str], None] = print,
        on_tick: Callable[[], None] = lambda: None,
        tick_every_s: float = 0.25,
        on_end: Callable[[RunResult], None] = lambda result: None,
        tell_restarts: Callable[[tuple[RestartStatus, ...]], None] | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._on_end = on_end
        self._write_restarts = tell_restarts or partial(write_restarts, run_dir)
        self._elsewhere = plan.elsewhere
        self._reached: set[str] = set()  # names of processes on other hosts whose health check has succeeded
        self._began_at = 0.0
        self._start_timeout_s = start_timeout_s
        self._grace_s = grace_s
        self._save_s = save_s
        self._suspend = suspend
        self._saved_by: float | None = None  # the time by which a run that was asked to suspend must have ended
        self._announce = announce
        self._on_tick = on_tick
        self._tick_every_s = tick_every_s
        self._processes = {spec.name: Process(spec, run_dir / "logs") for spec in plan.specs}
        self._probed_at: dict[str, float] = {}
        self._interrupts = 0
        self._result: RunResult | None = None
        self._spared: set[str] = set()
        self._usage_before = read_usage(run_dir)
        self._reaper: IO[str] | None = None

    def run(self) -> RunResult:
        """Start everything, keep it alive, stop everything; return once no process of the run is left."""
        with self._signals(), self._reaping():
            self._began_at = time.monotonic()
            try:
                self._tell_restarts()  # overwrites the restarts that an earlier launcher wrote
                result = self._watch()
                self._on_end(result)
            finally:
                if self._result is not None and self._result.outcome is RunOutcome.STOPPED and self._interrupts < 2:
                    self._announce("stopping; press Ctrl-C again to kill at once")
                alive = [process for process in self._processes.values() if process.pid is not None]
                alive.sort(key=lambda process: process.spec.stop_order)
                for _, stage in groupby(alive, key=lambda process: process.spec.stop_order):
                    self._stop_together(list(stage))
                self._tell_usage()
        return result

    @property
    def spared(self) -> frozenset[str]:
        """The names of processes that failed for good and that the run continues without."""
        return frozenset(self._spared)

    @property
    def ended(self) -> frozenset[str]:
        """The names of processes that ended for good, together with all processes that they had started."""
        return frozenset(name for name, process in self._processes.items() if process.state is State.ENDED)

    @property
    def stopping(self) -> frozenset[str]:
        return frozenset(name for name, process in self._processes.items() if process.state is State.STOPPING)

    def knows(self, name: str) -> bool:
        """Return whether the run has, or had, a process of this name."""
        return name in self._processes

    def add(self, spec: ProcessSpec) -> None:
        """Start and supervise one more process, from the next tick on. Call this only from `on_tick`."""
        if self.knows(spec.name):
            raise ValueError(f"process names must be unique, got {spec.name!r} again")
        self._announce(f"starting {spec.name}")
        self._processes[spec.name] = Process(spec, self._run_dir / "logs")

    def revive(self, spec: ProcessSpec, *, up_s: float) -> None:
        """Restart a process that was not started here and died after `up_s` seconds; call this only from `on_tick`."""
        process = self._processes[spec.name] = Process(spec, self._run_dir / "logs")
        self._died(process, f"{spec.name} died", up_s, time.monotonic())

    def refuse(self, spec: ProcessSpec, reason: str) -> None:
        """Record that the run continues without this process, and write the reason into its log."""
        self._announce(f"the run continues without {spec.name}: {reason}")
        process = Process(spec, self._run_dir / "logs")
        process.note(f"pipelinerl: {reason}")
        process.state = State.ENDED
        self._processes[spec.name] = process
        self._spared.add(spec.name)

    def stop_engine(self, name: str) -> None:
        """Stop the process `name` for good if it runs. Call this only from `on_tick`; repeated calls are harmless."""
        process = self._processes.get(name)
        if process is None or process.state in (State.STOPPING, State.ENDED):
            return
        if process.exit_status() is not None or process.pid is None:
            self._forget(process)
            process.state = State.ENDED
            return
        self._announce(f"stopping {name}")
        process.ask_to_stop()
        process.state, process.due = State.STOPPING, time.monotonic() + self._grace_s

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._processes.items() if process.pid is not None}

    def _watch(self) -> RunResult:
        """Advance the processes until the run has a result; raise what `on_tick` raises."""
        ticked_at = written_at = float("-inf")
        while self._result is None:
            now = time.monotonic()
            if self._interrupts and not self._saves(now):
                self._stopped()
                continue
            for process in self._processes.values():
                self._advance(process, now)
            if now - ticked_at >= self._tick_every_s:
                ticked_at = now
                self._on_tick()
            if now - written_at >= _USAGE_EVERY_S:
                written_at = now
                self._tell_usage()
            time.sleep(_TICK_S)
        return self._result

    def _saves(self, now: float) -> bool:
        """Return True while an interrupted run still has time to save its state; the first call requests the saving."""
        if self._interrupts > 1:
            return False
        if self._saved_by is None:
            if not self._suspend():
                return False
            self._announce("saving; press Ctrl-C again to kill at once, and lose what came after the last checkpoint")
            self._saved_by = now + self._save_s
        elif now > self._saved_by:
            self._announce(f"the state was not saved within {self._save_s:g} s (launch.save_s)")
            return False
        return True

    def _stopped(self) -> None:
        self.end(RunOutcome.STOPPED, f"resume with: pipelinerl run --resume {self._run_dir}")

    def _advance(self, process: Process, now: float) -> None:
        if self._result is not None or process.state is State.ENDED:
            return
        name = process.spec.name
        if process.state is State.WAITING:
            if all(self._is_healthy(each, process, now) for each in process.spec.after):
                self._start(process, now)
        elif process.state is State.BACKING_OFF:
            if now >= process.due:
                self._start(process, now)
        elif process.state is State.STOPPING:
            if process.exit_status() is not None or now >= process.due:
                self._forget(process)
                process.state = State.ENDED
        elif (status := process.exit_status()) is not None:
            self._exited(process, status, now)
        elif process.state is State.STARTING and now - self._probed_at.get(name, float("-inf")) >= _PROBE_EVERY_S:
            if process.answers():
                process.state = State.HEALTHY
            elif now - process.started_at > self._start_timeout_s:
                words = f"{name} did not answer {process.spec.health} within {self._start_timeout_s:g} s of its start"
                self._fail(process, words)
            self._probed_at[name] = time.monotonic()

    def _is_healthy(self, name: str, waiting: Process, now: float) -> bool:
        if name in self._processes:
            return self._processes[name].state is State.HEALTHY
        if name in self._reached:
            return True
        if now - self._probed_at.get(name, float("-inf")) < _PROBE_EVERY_S:
            return False
        if answers(self._elsewhere[name]):
            self._reached.add(name)
        elif now - self._began_at > self._start_timeout_s:
            self._fail(
                waiting,
                f"{waiting.spec.name} waits for {name}, which did not answer {self._elsewhere[name]} within "
                f"{self._start_timeout_s:g} s; check that its host is up and reachable",
            )
        self._probed_at[name] = time.monotonic()
        return name in self._reached

    def _start(self, process: Process, now: float) -> None:
        try:
            self._tell_reaper("+", process.start(now))
        except OSError as error:
            self.end(RunOutcome.FAILED, f"{process.spec.name} cannot be started: {error}")

    def _exited(self, process: Process, status: int, now: float) -> None:
        spec = process.spec
        self._forget(process)
        process.state = State.ENDED
        if spec.on_exit is OnExit.COMPLETE and status == 0:
            if self._saved_by is None:
                self.end(RunOutcome.COMPLETED, "completed")
            else:
                self._stopped()
            return
        if spec.on_exit is OnExit.DONE and status == 0:
            return
        words, up_s = f"{spec.name} ended ({exit_words(status)})", now - process.started_at
        if status == _USER_ERROR:
            self._fail(process, words)
        else:
            self._died(process, words, up_s, now)

    def _died(self, process: Process, words: str, up_s: float, now: float) -> None:
        budget = process.budget
        if budget.is_spent_by(up_s):
            unforgiven = round(budget.unforgiven)
            spent = f" after {unforgiven} restarts, its whole budget" if unforgiven else ""
            self._fail(process, words + spent)
            return
        wait_s = budget.died(up_s)
        process.state, process.due = State.BACKING_OFF, now + wait_s
        self._announce(f"{words}; restarting it in {wait_s:g} s ({budget.unforgiven:.0f} of {process.spec.restarts})")
        for other in self._processes.values():
            if other is process or process.spec.group is None or other.spec.group != process.spec.group:
                continue
            # The others of the group would wait for the dead process forever, and it may need those that have ended.
            if other.pid is not None or other.state is State.ENDED:
                self._announce(f"restarting {other.spec.name} with it")
                self._forget(other)
                other.state, other.due = State.BACKING_OFF, process.due
        self._tell_restarts()

    def _tell_restarts(self) -> None:
        died = (each.budget.status(name) for name, each in self._processes.items() if each.budget.deaths)
        try:
            self._write_restarts(tuple(died))
        except OSError as error:
            self._announce(f"cannot write the restarts to {self._run_dir}: {error.strerror}")

    def _tell_usage(self) -> None:
        with contextlib.suppress(OSError):  # these figures must not end a run
            for name, process in self._processes.items():
                write_usage(self._run_dir, name, self._usage_before.get(name, Usage()) + process.usage)

    def _fail(self, process: Process, words: str) -> None:
        words = f"{words}; its log {process.log} ends:\n{process.last_lines()}"
        if process.spec.on_exit is OnExit.SPARE:
            self._announce(f"the run continues without {process.spec.name}: {words}")
            self._spared.add(process.spec.name)
            self._forget(process)
            process.state = State.ENDED
        else:
            self.end(RunOutcome.FAILED, words)

    def end(self, outcome: RunOutcome, message: str) -> None:
        """End the run with this result; `on_tick` may call this method, too."""
        self._result = RunResult(outcome, message)

    def _stop_together(self, stage: list[Process]) -> None:
        for process in stage:
            process.ask_to_stop()
        grace_s = max(self._grace_s, *(process.spec.grace_s for process in stage))
        deadline = time.monotonic() + grace_s
        while any(process.exit_status() is None for process in stage):
            if time.monotonic() > deadline or self._interrupts >= 2:
                break
            time.sleep(_TICK_S)
        for process in stage:
            if process.exit_status() is None and self._interrupts < 2:
                self._announce(f"{process.spec.name} did not stop within {grace_s:g} s; killing it")
            self._forget(process)
            process.state = State.ENDED

    def _forget(self, process: Process) -> None:
        group = process.pid
        process.finish()
        if group is not None:
            self._tell_reaper("-", group)

    def _tell_reaper(self, sign: str, group: int) -> None:
        if self._reaper is not None:
            with contextlib.suppress(BrokenPipeError):  # the reaper was killed; the kernel still kills the children
                self._reaper.write(f"{sign}{group}\n")
                self._reaper.flush()

    @contextlib.contextmanager
    def _reaping(self) -> Iterator[None]:
        command = [sys.executable, "-S", "-E", str(_REAPER)]
        reaper = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        self._reaper = reaper.stdin
        try:
            yield
        finally:
            with contextlib.suppress(BrokenPipeError):
                if self._reaper is not None:
                    self._reaper.close()
            reaper.wait()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        def note(_number: int, _frame: FrameType | None) -> None:
            self._interrupts += 1

        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        # Under nohup, SIGHUP is ignored; it must remain ignored.
        wanted = [number for number in handled if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, note) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class EngineProcesses:
    """Starts and stops engines as the status requests; `give_up` reports to the controller each that cannot start."""

    def __init__(self, supervisor: Supervisor, launch: Launch, *, give_up: Callable[[str], None]) -> None:
        self._supervisor = supervisor
        self._launch = launch
        self._give_up = give_up
        placement = launch.placement
        self._ports = set(launch.ports.values())
        self._devices = placement.head.devices
        self._held = {
            name: on for name, on in placement.assignments.items() if placement.host_of(name) is placement.head
        }

    def follow(self, status: RunStatus) -> None:
        """Start engines that are requested but do not run yet, and stop engines that the status lists to be stopped."""
        for name in self._held.keys() & self._supervisor.ended:
            del self._held[name]
        for requested in status.fleet.requested:
            if requested.name in status.fleet.to_stop:
                continue
            if not self._supervisor.knows(requested.name):
                self._start(requested)
            elif requested.name in self._supervisor.spared:
                self._give_up(requested.name)
        for name in status.fleet.to_stop:
            self._supervisor.stop_engine(name)

    def _start(self, requested: RequestedEngine) -> None:
        """Start a requested engine on free devices, or record that the run continues without it if too few are free.

        If a process that holds devices is stopping, the decision waits for the next status.
        """
        on = self._take_devices(requested)
        if on is None and self._held.keys() & self._supervisor.stopping:
            return
        # The port of a process that is down is not free either: the process will bind it again.
        port = next(port for port in free_ports(len(self._ports) + 1) if port not in self._ports)
        self._ports.add(port)
        spec = self._launch.engine(requested.name, port=port, type=requested.type, on=on or Assignment())
        if on is not None:
            self._supervisor.add(spec)
            return
        needs = self._launch.config.gpus_of_engine(requested.type)
        holders = [
            (self._devices.label(i), ", ".join(name for name, on in self._held.items() if i in on.indices) or "free")
            for i in range(len(self._devices))
        ]
        state = "; ".join(f"{label}: {names}" for label, names in holders)
        refusal = (
            f"{requested.name} takes {needs} GPU{'s' if needs > 1 else ''}, and too few are free ({state}); take an "
            "engine out first, or start the run with an engine.memory_share and a trainer.memory_share that leave room "
            "for another"
        )
        self._supervisor.refuse(spec, refusal)

    def _take_devices(self, requested: RequestedEngine) -> Assignment | None:
        """Reserve devices for an engine, least used first, and return them; None if too few are free."""
        config = self._launch.config
        needs = config.gpus_of_engine(requested.type) if self._devices.each else 0
        if not needs:
            return Assignment()
        share = config.engine.memory_share
        wanted = share if share is not None and config.weights.backend != "nccl" else 1.0
        used = [
            sum(1.0 if each.share is None else each.share for each in self._held.values() if index in each.indices)
            for index in range(len(self._devices))
        ]
        fitting = [index for index in range(len(used)) if used[index] + wanted <= 1.0 + ROUNDING]
        chosen = sorted(sorted(fitting, key=lambda index: used[index])[:needs])
        if len(chosen) < needs:
            return None
        self._held[requested.name] = Assignment(tuple(chosen), share)
        return self._held[requested.name]
