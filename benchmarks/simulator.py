"""Does `pipelinerl simulate` say what happens? Short real runs of each schedule, against their simulation.

    paced   the bigram engine and trainer, which wait as long as devices would take (`benchmarks/paced_run.py`): all
            at once, so that the machine is as busy for each
    tiny    the `tiny` recipe, whose engine and trainer share two cores with all else; then the ages of what trains
            under the pairs (j, k) of `benchmarks staleness`, against its record
    fleet   no run: 128 to 1,024 engines, simulated on the paced hardware; how long 100 steps of 1,024 engines take
    mocks   no run: rollouts a second of the fleets of `benchmarks scale`, which docs/clusters.md has as measured

Both are calibrated on the synchronous arm and, for what engine and trainer suffer beside each other, on the one in
flight; the rest is predicted. An arm differs in the schedule's flags alone. Each is told with the error of its step's
seconds, simulated ÷ measured − 1. The synchronous arm is run twice: how far it is from its first time is what the
machine's noise is worth, and no prediction can be better. `--quick` runs few arms and steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks.measure import RESULTS, write_record
from benchmarks.paced import ENGINE, TRAINER
from benchmarks.scale import ACTORS, FLEETS, GROUP, PACE, STEP
from inference_contract.weights import OnUpdate
from pipelinerl.commands.simulation.from_recipe import observed, setting_of
from pipelinerl.config.recipe import load
from pipelinerl.observability.events import read_events
from pipelinerl.observability.run_history import tell
from pipelinerl.simulation.calibration import ObservedRun, calibrate
from pipelinerl.simulation.hardware import EngineTimes, Hardware, TrainerTimes
from pipelinerl.simulation.lengths import HeavyTailedLengths, ObservedLengths
from pipelinerl.simulation.measured import TRUSTED, Measured, measure, simulated_like
from pipelinerl.simulation.prediction import Prediction
from pipelinerl.simulation.setting import SimulatedSetting
from pipelinerl.simulation.simulator import simulate
from pipelinerl.staleness import StalenessBounds

_DEADLINE_S: Final = 1200.0
_TINY: Final = "tiny"
#: So finely the simulated time of a mock's answer is cut.
_MOCK_STEP_S: Final = 0.01
_SYNCHRONOUS, _IN_FLIGHT, _AGAIN = "conventional G = 1", "in flight", "conventional G = 1, again"
_ON_POLICY: Final = ("staleness.j=1", "staleness.k=1")
#: Arms by what they change; how many batches' worth a generation is.
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
_QUICK: Final = (_SYNCHRONOUS, "one step off", "drain", _IN_FLIGHT, _AGAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bed:
    """What arms have in common: recipe, rollouts of an optimizer step, how many run at once, what calibrates."""

    name: str
    recipe: str
    rollouts: int
    steps: int
    calibrated_on: tuple[str, ...]
    at_once: int = 1
    changes: tuple[str, ...] = ()

    def of(self, arm: str) -> list[str]:
        """What an arm changes of the recipe."""
        generation, flags = ARMS[arm]
        rollouts = self.rollouts * generation
        return [
            *self.changes,
            *flags,
            f"training.rollouts_per_step={rollouts}",
            f"training.mini_batches={generation}",
            f"actor.groups_in_flight={max(64, rollouts // 8)}",
            f"run.steps={max(12, self.steps // generation)}",
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """An arm, measured and simulated; `error` is of a step's seconds."""

    bed: str
    arm: str
    calibrates: bool
    error: float
    measured: Measured
    predicted: Prediction

    @property
    def line(self) -> str:
        """As the table says it."""
        m, p = self.measured, self.predicted
        note = "calibrates" if self.calibrates else ("" if abs(self.error) <= TRUSTED else "MISSED")
        return (
            f"{self.arm:28} {m.step_s:7.3f} {p.step_s:9.3f} {self.error:+7.1%}   {m.tokens_per_s:7.0f} "
            f"{p.tokens_per_s:7.0f}   {m.trainer_wait:5.0%} {p.trainer_wait:5.0%}   {m.staleness_mean:4.2f} "
            f"{p.staleness_mean:4.2f}   {m.discarded:5.1%} {p.discarded:5.1%}   {note}"
        )


_HEAD: Final = (
    f"{'':28} {'step [s]':>7} {'simulated':>9} {'error':>7}   {'tok/s':>7} {'sim.':>7}   {'wait':>5} {'sim.':>5}   "
    f"{'age':>4} {'sim.':>4}   {'disc.':>5} {'sim.':>5}"
)


def measured_run(recipe: str, changes: Sequence[str], *, where: Path, name: str) -> ObservedRun:
    """Run it in processes of its own.

    Raises:
        RuntimeError: it did not end as it should.
    """
    wanted = [*changes, f"run.directory={where}", f"run.name={name}"]
    command = [sys.executable, "-m", "pipelinerl.cli", "run", recipe, *wanted]
    _ran(command)
    return observed(where / name)


def measured_paced(changes: Sequence[str], *, where: Path, name: str) -> ObservedRun:
    """The same of paced devices, in one process."""
    _ran([sys.executable, "-m", "benchmarks.paced_run", str(where / name), *changes])
    return _observed_paced(where / name / "run")


def _observed_paced(folder: Path) -> ObservedRun:
    """What `paced_run` left behind."""
    config, events = load(folder / "recipe.toml"), read_events(folder / "events.jsonl")
    steps = tell(events).steps
    prompts = sum(step["tokens"] - step["sampled_tokens"] for step in steps) / sum(step["rollouts"] for step in steps)
    lengths = ObservedLengths(tuple(json.loads((folder / "lengths.json").read_text())))
    return ObservedRun(events=events, setting=setting_of(config, lengths=lengths, prompt_tokens=round(prompts)))


def _ran(command: Sequence[str]) -> None:
    done = subprocess.run(command, text=True, capture_output=True, timeout=_DEADLINE_S)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")


def measured_runs(bed: Bed, arms: Sequence[str], where: Path) -> dict[str, ObservedRun]:
    """Run every arm."""

    def measured(arm: str) -> ObservedRun:
        began = time.monotonic()
        name, changes = f"{bed.name}-{arms.index(arm)}", bed.of(arm)
        if bed.recipe == _TINY:
            done = measured_run(bed.recipe, changes, where=where, name=name)
        else:
            done = measured_paced(changes, where=where, name=name)
        print(f"simulator: {bed.name}, {arm}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return done

    with ThreadPoolExecutor(bed.at_once) as pool:
        return dict(zip(arms, pool.map(measured, arms), strict=True))


def predicted_cells(bed: Bed, runs: Mapping[str, ObservedRun]) -> tuple[list[Cell], Hardware]:
    """What the arms' runs were, beside what is predicted from those that calibrate."""
    hardware = calibrate([runs[arm] for arm in bed.calibrated_on])
    found = []
    for arm, run in runs.items():
        measured = measure(run.events)
        predicted = simulated_like(run.events, run.setting, hardware)
        error = measured.errors(predicted)["step_s"]
        found.append(
            Cell(
                bed=bed.name,
                arm=arm,
                calibrates=arm in bed.calibrated_on,
                error=error,
                measured=measured,
                predicted=predicted,
            )
        )
    return found, hardware


def ages(hardware: Hardware, run: ObservedRun) -> list[dict[str, Any]]:
    """For each (j, k): age and discarded share that `benchmarks staleness` measured once, and what is simulated now."""
    recorded = json.loads((RESULTS / "staleness.json").read_text())["runs"]
    rows = []
    for bounds in dict.fromkeys(each["arm"].rpartition(" ")[0] for each in recorded):
        runs = [each for each in recorded if each["arm"].startswith(bounds)]
        j, k = bounds.strip("()").split(", ")
        config = load(_TINY, [f"staleness.j={j}", f"staleness.k={k}"])
        setting = setting_of(config, lengths=run.setting.lengths, prompt_tokens=run.setting.prompt_tokens, steps=200)
        prediction = simulate(setting, hardware)
        rows.append(
            {
                "bounds": bounds,
                "age": fmean(each["age"] for each in runs),
                "age_simulated": prediction.staleness_mean,
                "discarded": fmean(each["discarded"] for each in runs),
                "discarded_simulated": prediction.discarded,
            }
        )
    return rows


def fleet(*, steps: int, sizes: Sequence[int] = (128, 256, 512, 1024)) -> list[dict[str, float]]:
    """Tokens per second and processor seconds of so many engines, 8 rollouts each in a step."""
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
        rows.append(
            {
                "engines": engines,
                "steps": steps,
                "tokens_per_s": prediction.tokens_per_s,
                "engine_idle": prediction.engine_idle,
                "rollouts": float(setting.rollouts_per_step * steps),
                "processor_s": time.process_time() - began,
            }
        )
    return rows


def mocks(sizes: Sequence[int] = FLEETS) -> list[dict[str, float]]:
    """Rollouts per second of mock engines, which answer a group as a whole, however many they have."""
    rows = []
    for engines in sizes:
        setting = SimulatedSetting(
            steps=engines // 2,
            engines=engines,
            slots=64,
            bounds=StalenessBounds(1, float("inf")),
            on_update=OnUpdate.CONTINUE,
            rollouts_per_step=STEP // GROUP,
            group_size=1,
            lengths=HeavyTailedLengths(PACE.median_s / _MOCK_STEP_S, PACE.spread, 1 << 16),
            actors=ACTORS,
            groups_in_flight=engines,
            max_groups=engines,
        )
        times = Hardware(engine=EngineTimes(step_s=_MOCK_STEP_S), trainer=TrainerTimes(token_s=1e-12))
        rows.append({"engines": engines, "rollouts_per_s": GROUP * simulate(setting, times).rollouts_per_s})
    return rows


def run(quick: bool, beds: Sequence[str] = ("paced", "tiny", "fleet", "mocks")) -> dict[str, Any]:
    """Measure, simulate, print; but for `quick`, record."""
    record: dict[str, Any] = {"quick": quick, "trusted": TRUSTED}
    with tempfile.TemporaryDirectory(prefix="pipelinerl-simulator-") as folder:
        for bed in known_beds(quick=quick):
            if bed.name in beds:
                record |= told(bed, measured_runs(bed, _QUICK if quick else tuple(ARMS), Path(folder)))
    if "fleet" in beds:
        record["fleet"] = fleet(steps=10 if quick else 100)
        print("\nsimulator: fleet, 8 rollouts an engine in each step")
        for row in record["fleet"]:
            print(
                f"{row['engines']:6.0f} engines {row['tokens_per_s']:12,.0f} tokens/s, idle {row['engine_idle']:.0%}; "
                f"{row['steps']:.0f} steps of {row['rollouts']:,.0f} rollouts: {row['processor_s']:.1f} processor s"
            )
    if "mocks" in beds:
        record["mocks"] = mocks(FLEETS[:2] if quick else FLEETS)
        told_of = ", ".join(f"{row['engines']:.0f}: {row['rollouts_per_s']:.1f}" for row in record["mocks"])
        print(f"\nsimulator: rollouts/s of so many mock engines, {told_of}")
    if not quick:
        known = RESULTS / "simulator.json"
        before = json.loads(known.read_text()) if known.exists() else {}
        kept = {name: before[name] for name in ("paced", "tiny", "ages", "fleet", "mocks") if name in before}
        write_record("simulator", kept | record)  # what was not run now stays as it was
    return record


def known_beds(*, quick: bool) -> tuple[Bed, Bed]:
    """What there is to run."""
    paced = Bed(
        name="paced",
        recipe="paced",
        rollouts=64,
        steps=16 if quick else 30,
        calibrated_on=(_SYNCHRONOUS, _IN_FLIGHT),
        at_once=len(ARMS),
    )
    tiny = Bed(
        name="tiny",
        recipe=_TINY,
        rollouts=256,
        steps=60 if quick else 120,
        calibrated_on=(_SYNCHRONOUS, _IN_FLIGHT),
        changes=("evaluation.interval_steps=1000000", "evaluation.problems=64"),
    )
    return paced, tiny


def told(bed: Bed, runs: Mapping[str, ObservedRun]) -> dict[str, Any]:
    """Print what the runs of a bed were beside their predictions; returns it for the record."""
    found, hardware = predicted_cells(bed, runs)
    print(f"\nsimulator: {bed.name}, calibrated on {' and '.join(bed.calibrated_on)}\n{_HEAD}")
    print("\n".join(cell.line for cell in found))
    predicted = [cell for cell in found if not cell.calibrates]
    within = sum(abs(cell.error) <= TRUSTED for cell in predicted)
    print(f"{within} of {len(predicted)} predicted arms within {TRUSTED:.0%}")
    record: dict[str, Any] = {bed.name: {"hardware": asdict(hardware), "cells": [_recorded(cell) for cell in found]}}
    if bed.recipe == _TINY:
        record["ages"] = ages(hardware, runs[_SYNCHRONOUS])
        print("\nsimulator: age and discarded share, against the record of `benchmarks staleness`")
        for row in record["ages"]:
            print(
                f"{row['bounds']:9} age {row['age']:4.1f}, simulated {row['age_simulated']:4.1f}; "
                f"discarded {row['discarded']:5.1%}, simulated {row['discarded_simulated']:5.1%}"
            )
    return record


def _recorded(cell: Cell) -> dict[str, Any]:
    return asdict(cell) | {"predicted": cell.predicted.as_dict()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few arms and steps; leaves no record")
    parser.add_argument("beds", nargs="*", help="paced, tiny, fleet, mocks (default: all)")
    given = parser.parse_args()
    run(given.quick, given.beds or ("paced", "tiny", "fleet", "mocks"))


if __name__ == "__main__":
    main()
