"""Compare `pipelinerl simulate` with short real runs of each schedule, on paced devices.

In these runs engine and trainer wait as long as devices would take (`benchmarks/paced.py`). All arms (schedules) run
concurrently, so the machine is equally busy for each. Two arms calibrate the simulation: the synchronous one, and `in
flight`, which shows how engine and trainer slow each other down; all other arms are predicted. The error of an arm is
the seconds of a step, simulated ÷ measured − 1. The synchronous arm runs twice; the difference between these two runs
is noise, which limits the accuracy of any prediction.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.measure import Row, report
from benchmarks.paced import paced_recipe
from benchmarks.processes import python
from pipelinerl.plugins.simulation.calibration import TRUSTED, Measured, ObservedRun, calibrate, measure, simulated_like
from pipelinerl.plugins.simulation.from_recipe import observed
from pipelinerl.plugins.simulation.hardware import Hardware
from pipelinerl.plugins.simulation.prediction import Prediction

_DEADLINE_S: Final = 1200.0
_ROLLOUTS: Final = 64
_SYNCHRONOUS, _IN_FLIGHT, _AGAIN = "conventional G = 1", "in flight", "conventional G = 1, again"
_ON_POLICY: Final = ("staleness.j=1", "staleness.k=1")
#: By arm: the number of batches per generation, and the overrides of the recipe's keys.
ARMS: Final[Mapping[str, tuple[int, tuple[str, ...]]]] = {
    _SYNCHRONOUS: (1, _ON_POLICY),
    "conventional G = 2": (2, _ON_POLICY),
    "conventional G = 4": (4, _ON_POLICY),
    "one step off": (1, ("staleness.j=1", "staleness.k=2")),
    "drain": (1, ("staleness.j=1", "staleness.k=4", "engine.on_update=drain")),
    "RLAX (4, 8)": (1, ("staleness.j=4", "staleness.k=8")),
    _IN_FLIGHT: (1, ("staleness.j=1", "staleness.k=4", "engine.on_update=continue")),
    _AGAIN: (1, _ON_POLICY),
}
_QUICK: Final = (_SYNCHRONOUS, "one step off", _IN_FLIGHT)


def changes_of(arm: str, *, steps: int) -> list[str]:
    """Return an arm's overrides of the keys of the paced recipe."""
    generation, keys = ARMS[arm]
    rollouts = _ROLLOUTS * generation
    return [
        *keys,
        f"training.rollouts_per_step={rollouts}",
        f"training.mini_batches={generation}",
        f"actor.groups_in_flight={max(64, rollouts // 8)}",
        f"run.steps={max(12, steps // generation)}",
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Measurement and simulation of one arm; `error` is the relative error of a step's simulated seconds."""

    arm: str
    calibrates: bool
    error: float
    measured: Measured
    predicted: Prediction

    @property
    def row(self) -> Row:
        """The arm's row in the table."""
        m, p = self.measured, self.predicted
        shown = (
            f"{m.step_s:.3f} / {p.step_s:.3f} s ({self.error:+.1%}); wait {m.trainer_wait:.0%} / {p.trainer_wait:.0%}; "
            f"age {m.staleness_mean:.2f} / {p.staleness_mean:.2f}; discarded {m.discarded:.1%} / {p.discarded:.1%}"
        )
        if self.calibrates:
            return Row(self.arm, shown, "calibrates")
        return Row(self.arm, shown, f"± {TRUSTED:.0%}", abs(self.error) <= TRUSTED)


def paced_run(recipe: Path, folder: Path, changes: Sequence[str]) -> ObservedRun:
    """Run the paced recipe in processes of its own; the run's directory is below `folder`."""
    words = ["-m", "pipelinerl.cli", "run", str(recipe), f"run.directory={folder}", *changes]
    python(words, timeout_s=_DEADLINE_S)
    return observed(folder / "paced")


def predicted_cells(runs: Mapping[str, ObservedRun]) -> tuple[list[Cell], Hardware]:
    """Return every arm's measurement and prediction, and the `Hardware` that was calibrated on two of the arms."""
    hardware = calibrate([runs[_SYNCHRONOUS], runs[_IN_FLIGHT]])
    cells = []
    for arm, run in runs.items():
        measured = measure(run.events)
        predicted = simulated_like(run.events, run.setting, hardware)
        error = measured.errors(predicted)["step_s"]
        calibrates = arm in (_SYNCHRONOUS, _IN_FLIGHT)
        cells.append(Cell(arm=arm, calibrates=calibrates, error=error, measured=measured, predicted=predicted))
    return cells, hardware


def run(quick: bool = False) -> None:
    """Measure and simulate every arm, print the table and, unless `quick`, write the record."""
    arms, steps = (_QUICK, 12) if quick else (tuple(ARMS), 30)
    with tempfile.TemporaryDirectory(prefix="simulator-") as folder, ThreadPoolExecutor(len(arms)) as pool:
        recipe, folders = paced_recipe(Path(folder)), [Path(folder) / str(place) for place in range(len(arms))]
        finished = pool.map(partial(paced_run, recipe), folders, (changes_of(arm, steps=steps) for arm in arms))
        runs = dict(zip(arms, finished, strict=True))
    cells, hardware = predicted_cells(runs)
    paced = {
        "hardware": asdict(hardware),
        "cells": [asdict(cell) | {"predicted": msgspec.to_builtins(cell.predicted, str_keys=True)} for cell in cells],
    }
    rows, title = [cell.row for cell in cells], "simulator: paced runs, measured / simulated"
    report("simulator", rows, {"trusted": TRUSTED, "paced": paced}, quick=quick, title=title)
