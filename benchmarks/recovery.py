"""Measure how long a killed trainer and a killed run take to recover, compared with a bare import.

    trainer    kill -9 of a live run's trainer: time from the start of the new process until it is ready
    run        kill -9 of all processes: time from the start of `run --resume` until the trainer is ready

The trainer is ready when the controller has accepted its report and recorded the event `trainer_ready`.

The bare arm starts the same processes in the same order on the same cores, but they only import the modules that the
run's processes import; the bare trainer also reads the bytes of the newest checkpoint. The launcher is suspended while
the bare trainer runs, so that it does not restart the real trainer meanwhile: the rest of the run waits in both arms.
Neither arm includes the launcher's restart delay of half a second.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import psutil

from benchmarks.measure import Paired, Row, paired, report
from benchmarks.processes import PATIENCE_S, LiveRun, live_run

_TARGET: Final = 1.5
_RECIPE: Final = (
    "tiny",
    "run.steps=1000000",
    "launch.restarts=1000",
    "evaluation.problems=0",
    "training.rollouts_per_step=64",
    "checkpoint.interval_steps=2",
)
#: Matches the module's name in a line that Python writes with PYTHONPROFILEIMPORTTIME.
_IMPORTED: Final = re.compile(r"import time:\s+\d+ \|\s+\d+ \|\s+(\S+)$")
#: Program of a bare process: pins itself to cores, imports modules in order, and reads a directory's files if given.
_BARE: Final = """
import importlib, os, pathlib, sys
cores, modules, directory = sys.argv[1:]
if cores:
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
for name in pathlib.Path(modules).read_text().split():
    try:
        importlib.import_module(name)
    except (ImportError, AttributeError):
        pass
if directory:
    for file in pathlib.Path(directory).rglob("*"):
        if file.is_file():
            file.read_bytes()
"""


def _newest_checkpoint(live: LiveRun) -> Path:
    return max((live.directory / "checkpoints").glob("step-*"))


def started_at(process: psutil.Process) -> float:
    """Return the start time of a process, in Unix seconds; psutil's own value is only precise to a second."""
    ticks = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


class Bare:
    """The bare arm: processes that only import the modules of a run's processes."""

    def __init__(self, live: LiveRun, folder: Path) -> None:
        """Collect the modules that each process of `live` imported, from logs written under PYTHONPROFILEIMPORTTIME."""
        self._folder = folder
        logs = {"launcher": live.directory.parent / "launcher.log"}
        logs |= {log.stem: log for log in (live.directory / "logs").glob("*.log")}
        for role, log in logs.items():
            matches = (_IMPORTED.match(line) for line in log.read_text(errors="replace").splitlines())
            (folder / role).write_text("\n".join(match[1] for match in matches if match))
        cores = sorted(os.sched_getaffinity(0))
        # Assign cores to processes as `launch.plan` does.
        self._cores = {"engine-0": cores[0], "trainer": cores[-1]} if len(cores) > 1 else {}

    def trainer(self, checkpoint: Path) -> float:
        """Start a bare trainer, which imports its modules and reads the checkpoint; return the seconds it takes."""
        began = time.perf_counter()
        _end(self._start("trainer", checkpoint))
        return time.perf_counter() - began

    def run(self, checkpoint: Path) -> float:
        """Start a bare process per process of the run; return the seconds until bare trainer and engine have ended."""
        began = time.perf_counter()
        for role in ("launcher", "redis", "controller"):
            _end(self._start(role))
        actor = self._start("actor-0")
        last = self._start("engine-0"), self._start("trainer", checkpoint)
        for process in last:
            _end(process)
        seconds = time.perf_counter() - began
        _end(actor)
        return seconds

    def _start(self, role: str, directory: Path | None = None) -> subprocess.Popen[bytes]:
        core = self._cores.get(role)
        words = ["" if core is None else str(core), str(self._folder / role), str(directory or "")]
        return subprocess.Popen(
            [sys.executable, "-c", _BARE, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.wait(PATIENCE_S):
        raise RuntimeError(f"a process of the bare arm ended with {process.returncode}")


@contextmanager
def _live(folder: Path) -> Iterator[tuple[LiveRun, Bare]]:
    with live_run(folder / "run") as live:
        began = live.start([*_RECIPE, f"run.directory={folder}", "run.name=run"], PYTHONPROFILEIMPORTTIME="1")
        live.next("checkpoint", after=began)
        live.kill()
        (folder / "modules").mkdir()
        yield live, Bare(live, folder / "modules")


def killed_trainers(live: LiveRun, bare: Bare, *, rounds: int) -> Paired:
    """Measure the recovery of a killed trainer, and the bare arm, once per round."""
    began = live.start(["--resume", str(live.directory)])
    live.next("checkpoint", after=began)
    samples: dict[str, list[float]] = {"bare": [], "recovery": []}
    for _ in range(rounds + 1):
        live.next("checkpoint", after=time.time())
        launcher, trainer = live.processes()[0], live.waited_for("trainer")
        launcher.suspend()
        killed = time.time()
        trainer.kill()
        time.sleep(1.0)  # gives the run's other processes time to finish their current work
        samples["bare"].append(bare.trainer(_newest_checkpoint(live)))
        launcher.resume()
        begins = started_at(live.waited_for("trainer", other_than=trainer.pid))
        samples["recovery"].append(live.next("trainer_ready", after=killed) - begins)
    live.kill()
    return Paired({arm: tuple(values[1:]) for arm, values in samples.items()})


def killed_runs(live: LiveRun, bare: Bare, *, rounds: int) -> Paired:
    """Measure the recovery of a killed run, and the bare arm, once per round."""

    def recovery() -> float:
        began = live.start(["--resume", str(live.directory)])
        seconds = live.next("trainer_ready", after=began) - began
        live.next("checkpoint", after=began)
        live.kill()
        return seconds

    return paired({"bare": lambda: bare.run(_newest_checkpoint(live)), "recovery": recovery}, rounds=rounds, warmup=1)


def run(quick: bool = False) -> None:
    """Run the benchmark, print its table and, unless `quick`, write its record."""
    rounds = 2 if quick else 9
    with tempfile.TemporaryDirectory(prefix="pipelinerl-recovery-") as folder, _live(Path(folder)) as (live, bare):
        measured = {
            "trainer killed": killed_trainers(live, bare, rounds=rounds),
            "run killed": killed_runs(live, bare, rounds=rounds),
        }
    rows, record = [], {}
    for name, timings in measured.items():
        ratio = timings.ratio("recovery", "bare")
        rows.append(Row(f"{name}: recovery / bare", ratio, f"<= {_TARGET:g}", ratio.median <= _TARGET))
        rows.append(Row("    seconds", f"{timings.median('recovery'):.3g} / {timings.median('bare'):.3g}"))
        record[name] = {"recovery_over_bare": ratio.as_dict(), **timings.as_dict()}
    report("recovery", rows, record, quick=quick)
