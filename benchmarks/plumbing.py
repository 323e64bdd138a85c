"""Measure the share of a run's processor time that neither samples nor trains, on `make run`'s recipe.

After 50 steps, windows of a hundred steps each are measured. The processes of engine and trainer count as compute,
including their HTTP and streams; all other processes are plumbing: actor, controller, stream server, verifiers and
launcher. The model is the smallest that ships, so no run spends a larger share on plumbing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from benchmarks.measure import Row, bootstrap_median, report
from benchmarks.processes import LiveRun, live_run, waited
from pipelinerl.config.recipe import load
from pipelinerl.observability.events import EventFollower

_RECIPE: Final = ("tiny", "run.steps=1000000", "run.name=live", "evaluation.interval_steps=1000000")
_COMPUTES: Final = ("engine", "trainer")
_MOST: Final = 0.15
_ACTOR_MS: Final = 0.2
_LEARNED: Final = 50


def run(quick: bool = False) -> None:
    """Run the benchmark, print its table and, unless `quick`, write its record."""
    steps, count = (20, 2) if quick else (100, 9)
    with tempfile.TemporaryDirectory(prefix="plumbing-") as name, live_run(Path(name) / "live") as live:
        live.start([*_RECIPE, f"run.directory={name}"])
        meter = _Meter(live)
        meter.wait(_LEARNED)
        windows = [_window(meter, steps) for _ in range(count)]
    spent = [each for each, _ in windows]
    plumbing = bootstrap_median([1 - sum(each[part] for part in _COMPUTES) / sum(each.values()) for each in spent])
    actor = bootstrap_median([1e3 * each["actor"] / rollouts for each, rollouts in windows])
    rows = [
        Row("plumbing: all but engine and trainer", plumbing, f"<= {_MOST}", plumbing.median <= _MOST),
        Row("actor's processor time of a rollout, ms", actor, f"<= {_ACTOR_MS}", actor.median <= _ACTOR_MS),
    ]
    report("plumbing", rows, {"plumbing": plumbing.as_dict(), "actor_ms": actor.as_dict()}, quick=quick)


class _Meter:
    def __init__(self, live: LiveRun) -> None:
        self.steps = 0
        self._live = live
        self._log = EventFollower(live.directory / "events.jsonl")
        self._seen: dict[int, tuple[str, float]] = {}

    def wait(self, steps: int) -> None:
        """Return once the run has taken `steps` steps."""

        def reached() -> bool | None:
            self.steps += sum(event["kind"] == "step" for event in self._log.new())
            return self.steps >= steps or None

        waited(reached, f"step {steps}", every_s=0.25)

    def processor_s(self) -> dict[str, float]:
        """Return processor seconds so far by role; an ended process keeps the value at which it was last seen."""
        for process in self._live.processes():
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


def _window(meter: _Meter, steps: int) -> tuple[dict[str, float], int]:
    """Return the processor seconds by role during the run's next `steps` steps, and the rollouts trained in them."""
    before, first = meter.processor_s(), meter.steps
    meter.wait(first + steps)
    after, taken = meter.processor_s(), meter.steps - first
    spent = {part: seconds - before.get(part, 0.0) for part, seconds in after.items()}
    return spent, taken * load("tiny").training.rollouts_per_step
