"""`make run`'s recipe as a run that goes on: its steps as they come, and what its processes take."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

import psutil

from pipelinerl.observability.events import EventFollower
from pipelinerl.system import tied_process

#: For the first steps.
_DEADLINE_S: Final = 600.0


@final
@dataclass
class LiveRecipe:
    """The run: its steps as they come, and its processes."""

    launcher: psutil.Process
    log: EventFollower
    steps: list[tuple[float, float]] = field(default_factory=list)
    """(second of the run, tokens sampled for it)"""
    _seen: dict[int, tuple[str, float]] = field(default_factory=dict)

    def read(self) -> None:
        """Take in what has come."""
        for event in self.log.new():
            if event["kind"] == "step":
                self.steps.append((float(event["elapsed_s"]), float(event["sampled_tokens"])))

    def processor_s(self) -> float:
        """Seconds that its processes have taken so far; of one that has ended, as last seen."""
        return sum(self.processor_s_by_part().values())

    def processor_s_by_part(self) -> dict[str, float]:
        """The same by role; `launcher`, `streams` (the stream server) and `judging` (processes of verifiers) beside."""
        with suppress(psutil.NoSuchProcess):
            for process in (self.launcher, *self.launcher.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    spent = sum(process.cpu_times()[:2])
                    name, _ = self._seen.get(process.pid) or (_part(process.cmdline()), 0.0)
                    self._seen[process.pid] = name, spent
        found: dict[str, float] = {}
        for name, spent in self._seen.values():
            found[name] = found.get(name, 0.0) + spent
        return found


def _part(command: Sequence[str]) -> str:
    """What a process of a run is there for."""
    if "pipelinerl.cli" in command:
        role = command[command.index("pipelinerl.cli") + 1]
        return "launcher" if role == "run" else role
    if any("valkey" in word or "redis-server" in word for word in command[:1]):
        return "streams"
    return "judging" if "pipelinerl.verifiers.worker_process" in command else "launcher"


@contextmanager
def live_recipe(folder: Path, *, learned: int, changes: Sequence[str] = ()) -> Iterator[LiveRecipe]:
    """`make run`'s recipe once it has taken `learned` steps, without an end and without an evaluation in between."""
    run_dir = folder / "watched"
    overrides = [
        "run.steps=1000000",
        "run.name=watched",
        f"run.directory={folder}",
        "evaluation.interval_steps=1000000",
        *changes,
    ]
    tie = [tied_process.__file__, str(os.getpid()), signal.SIGTERM.name, "", "--"]  # it has no end of its own
    command = [sys.executable, "-S", "-E", *tie, sys.executable, "-m", "pipelinerl.cli", "run", "tiny", *overrides]
    with (folder / "run.out").open("w") as out:
        launcher = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        run = LiveRecipe(psutil.Process(launcher.pid), EventFollower(run_dir / "events.jsonl"))
        deadline = time.monotonic() + _DEADLINE_S
        while len(run.steps) < learned:
            if launcher.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"the run has not come to step {learned}:\n{(folder / 'run.out').read_text()[-2000:]}"
                )
            time.sleep(0.5)
            run.read()
        yield run
    finally:
        launcher.send_signal(signal.SIGTERM)
        try:
            launcher.wait(120)
        except subprocess.TimeoutExpired:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
