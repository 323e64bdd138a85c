"""Measure the share of a run's processor time that neither samples nor trains, on `make run`'s recipe.

After 50 steps, windows of a hundred steps each are measured. The processes of engine and trainer count as compute,
including their HTTP and streams; all other processes are plumbing: actor, controller, stream server, verifiers and
launcher. The model is the smallest that ships, so no run spends a larger share on plumbing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, final

import psutil

from benchmarks.measure import Row, bootstrap_median, print_table, write_record
from pipelinerl.config.recipe import load
from pipelinerl.observability.events import EventFollower
from pipelinerl.system import tied_process

_COMPUTES: Final = ("engine", "trainer")
_MOST: Final = 0.15
_ACTOR_MS: Final = 0.2
_LEARNED: Final = 50
_DEADLINE_S: Final = 600.0


def run(quick: bool = False) -> None:
    """Run the benchmark, print its table and, unless `quick`, write its record."""
    steps, count = (20, 2) if quick else (100, 9)
    with tempfile.TemporaryDirectory(prefix="plumbing-") as name, _live(Path(name)) as live:
        live.wait(_LEARNED)
        windows = [_window(live, steps) for _ in range(count)]
    spent = [each for each, _ in windows]
    plumbing = bootstrap_median([1 - sum(each[part] for part in _COMPUTES) / sum(each.values()) for each in spent])
    actor = bootstrap_median([1e3 * each["actor"] / rollouts for each, rollouts in windows])
    rows = [
        Row("plumbing: all but engine and trainer", plumbing, f"<= {_MOST}", plumbing.median <= _MOST),
        Row("actor's processor time of a rollout, ms", actor, f"<= {_ACTOR_MS}", actor.median <= _ACTOR_MS),
    ]
    print_table("plumbing", rows)
    write_record("plumbing", {"plumbing": plumbing.as_dict(), "actor_ms": actor.as_dict()}, quick=quick)


@final
class _Live:
    def __init__(self, launcher: psutil.Process, log: EventFollower) -> None:
        self.steps = 0
        self._launcher = launcher
        self._log = log
        self._seen: dict[int, tuple[str, float]] = {}

    def wait(self, steps: int) -> None:
        """Return once the run has taken `steps` steps."""
        deadline = time.monotonic() + _DEADLINE_S
        while self.steps < steps:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the run took {self.steps} of {steps} steps in {_DEADLINE_S:g} s; see its output")
            time.sleep(0.25)
            self.steps += sum(event["kind"] == "step" for event in self._log.new())

    def processor_s(self) -> dict[str, float]:
        """Return processor seconds so far by role; an ended process keeps the value at which it was last seen."""
        with suppress(psutil.NoSuchProcess):
            for process in (self._launcher, *self._launcher.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    seconds = sum(process.cpu_times()[:2])
                    name, _ = self._seen.get(process.pid) or (_role(process.cmdline()), 0.0)
                    self._seen[process.pid] = name, seconds
        total: dict[str, float] = {}
        for name, seconds in self._seen.values():
            total[name] = total.get(name, 0.0) + seconds
        return total


def _role(command: Sequence[str]) -> str:
    if "pipelinerl.cli" in command:
        role = command[command.index("pipelinerl.cli") + 1]
        return "launcher" if role == "run" else role
    if any("valkey" in word or "redis-server" in word for word in command[:1]):
        return "streams"
    return "judging" if "pipelinerl.verifiers.worker_process" in command else "launcher"


@contextmanager
def _live(folder: Path) -> Iterator[_Live]:
    overrides = ["run.steps=1000000", "run.name=live", f"run.directory={folder}", "evaluation.interval_steps=1000000"]
    # `tied_process` ends the run when the benchmark ends, even if the benchmark is killed.
    tie = [tied_process.__file__, str(os.getpid()), signal.SIGTERM.name, "", "--"]
    command = [sys.executable, "-S", "-E", *tie, sys.executable, "-m", "pipelinerl.cli", "run", "tiny", *overrides]
    launcher = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
    try:
        yield _Live(psutil.Process(launcher.pid), EventFollower(folder / "live" / "events.jsonl"))
    finally:
        launcher.send_signal(signal.SIGTERM)
        try:
            launcher.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()


def _window(live: _Live, steps: int) -> tuple[dict[str, float], int]:
    """Return the processor seconds by role during the run's next `steps` steps, and the rollouts trained in them."""
    before, first = live.processor_s(), live.steps
    live.wait(first + steps)
    after, taken = live.processor_s(), live.steps - first
    spent = {part: seconds - before.get(part, 0.0) for part, seconds in after.items()}
    return spent, taken * load("tiny").training.rollouts_per_step
