"""Compare `pipelinerl simulate` with short real runs of each schedule, on paced devices.

    paced   runs whose engine and trainer wait as long as devices would take (`benchmarks/paced.py`), all at once, so
            that the machine is equally busy for each
    fleet   no run: 128 to 1,024 simulated engines, and the processor time of simulating them

The simulation is calibrated on the synchronous arm and, for how engine and trainer slow each other down, on the one in
flight; all other arms are predicted. The error is that of a step's seconds, simulated ÷ measured − 1. The synchronous
arm runs twice: the difference is the machine's noise, and no prediction can be better.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.measure import Row, print_table, write_record
from benchmarks.paced import ENGINE, TRAINER
from inference_contract.weights import OnUpdate
from pipelinerl.commands.simulation.from_recipe import setting_of
from pipelinerl.config.recipe import load
from pipelinerl.observability.events import read_events
from pipelinerl.observability.run_history import tell
from pipelinerl.simulation.calibration import TRUSTED, Measured, ObservedRun, calibrate, measure, simulated_like
from pipelinerl.simulation.hardware import Hardware
from pipelinerl.simulation.prediction import Prediction
from pipelinerl.simulation.setting import HeavyTailedLengths, ObservedLengths, SimulatedSetting
from pipelinerl.simulation.simulator import simulate
from pipelinerl.staleness import StalenessBounds

PARTS: Final = ("paced", "fleet")
_DEADLINE_S: Final = 1200.0
_ROLLOUTS: Final = 64
_SYNCHRONOUS, _IN_FLIGHT, _AGAIN = "conventional G = 1", "in flight", "conventional G = 1, again"
_ON_POLICY: Final = ("staleness.j=1", "staleness.k=1")
#: By arm: batches per generation, and the keys that it changes.
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
    """Return the changes of the paced recipe that an arm makes."""
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
    """An arm, measured and simulated; `error` is that of a step's seconds."""

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


def paced_run(folder: Path, changes: Sequence[str]) -> ObservedRun:
    """Run paced devices in a process of its own.

    Raises:
        RuntimeError: the run failed.
    """
    command = [sys.executable, "-m", "benchmarks.paced", str(folder), *changes]
    done = subprocess.run(command, text=True, capture_output=True, timeout=_DEADLINE_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    run_dir = folder / "run"
    config, events = load(run_dir / "recipe.toml"), read_events(run_dir / "events.jsonl")
    steps = tell(events).steps
    prompts = sum(step["tokens"] - step["sampled_tokens"] for step in steps) / sum(step["rollouts"] for step in steps)
    lengths = ObservedLengths(tuple(json.loads((run_dir / "lengths.json").read_text())))
    return ObservedRun(events=events, setting=setting_of(config, lengths=lengths, prompt_tokens=round(prompts)))


def predicted_cells(runs: Mapping[str, ObservedRun]) -> tuple[list[Cell], Hardware]:
    """Return every arm's measurement and prediction, and the hardware that two of them calibrate."""
    hardware = calibrate([runs[_SYNCHRONOUS], runs[_IN_FLIGHT]])
    cells = []
    for arm, run in runs.items():
        measured = measure(run.events)
        predicted = simulated_like(run.events, run.setting, hardware)
        error = measured.errors(predicted)["step_s"]
        calibrates = arm in (_SYNCHRONOUS, _IN_FLIGHT)
        cells.append(Cell(arm=arm, calibrates=calibrates, error=error, measured=measured, predicted=predicted))
    return cells, hardware


def fleet(*, steps: int, sizes: Sequence[int] = (128, 256, 512, 1024)) -> list[dict[str, float]]:
    """Simulate fleets of these sizes, with 8 rollouts per engine and step; actors and trainer grow along."""
    rows = []
    for engines in sizes:
        setting = SimulatedSetting(
            steps=steps,
            engines=engines,
            slots=64,
            bounds=StalenessBounds(1, 8),
            on_update=OnUpdate.CONTINUE,
            rollouts_per_step=engines * 8,
            group_size=8,
            lengths=HeavyTailedLengths(300.0, 0.8, 2048),
            prompt_tokens=100,
            actors=engines // 16,
            groups_in_flight=256,
            max_groups=1 << 20,
        )
        trainer = replace(TRAINER, token_s=TRAINER.token_s / (64 * engines / 128))
        began = time.process_time()
        prediction = simulate(setting, Hardware(engine=ENGINE, trainer=trainer))
        seconds = time.process_time() - began
        rows.append({"engines": engines, "tokens_per_s": prediction.tokens_per_s, "processor_s": seconds})
    return rows


def run(quick: bool = False, *, only: Sequence[str] = PARTS) -> None:
    """Measure, simulate, print and record."""
    record: dict[str, Any] = {"trusted": TRUSTED}
    if "paced" in only:
        arms, steps = (_QUICK, 12) if quick else (tuple(ARMS), 30)
        with tempfile.TemporaryDirectory(prefix="simulator-") as folder, ThreadPoolExecutor(len(arms)) as pool:
            folders = [Path(folder) / str(place) for place in range(len(arms))]
            observed = pool.map(paced_run, folders, (changes_of(arm, steps=steps) for arm in arms))
            runs = dict(zip(arms, observed, strict=True))
        cells, hardware = predicted_cells(runs)
        print_table("simulator: paced runs, measured / simulated", [cell.row for cell in cells])
        record["paced"] = {
            "hardware": asdict(hardware),
            "cells": [asdict(cell) | {"predicted": cell.predicted.as_dict()} for cell in cells],
        }
    if "fleet" in only:
        record["fleet"] = fleet(steps=10 if quick else 100)
        rows = [
            Row(f"{each['engines']} engines: tokens/s; processor seconds to simulate",
                f"{each['tokens_per_s']:,.0f}; {each['processor_s']:.1f}")
            for each in record["fleet"]
        ]  # fmt: skip
        print_table("simulator: fleets", rows)
    write_record("simulator", record, quick=quick or set(only) != set(PARTS))
