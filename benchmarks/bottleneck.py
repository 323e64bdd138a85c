"""Check the advice of `pipelinerl bottleneck`: make the change it names, and compare prediction with run.

Three runs on paced devices (`benchmarks/paced.py`) wait for their engine, their trainer and their verifier. From each
run's files the command predicts the seconds of a step after each change; then the recommended change is made in a
second run. All first runs share the machine at the same time, and so do all second runs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.measure import Row, report
from benchmarks.paced import PacedTrainer, engine, paced_recipe
from benchmarks.simulator import paced_run
from inference_contract.engine import Engine
from pipelinerl.engines.options import EngineOptions
from pipelinerl.plugins.simulation.bottleneck import actor_seconds, newest_part, stretches, tried
from pipelinerl.plugins.simulation.calibration import measure
from pipelinerl.plugins.simulation.hardware import EngineTimes

#: Seconds that the verifier takes for a group of answers.
_VERIFY_S: Final = 0.3
#: Seconds that the slow trainer takes for a token.
_SLOW_TOKEN_S: Final = 0.002
_SLOW: Final = EngineTimes(step_s=0.06, row_s=0.001)
#: A change must help by the predicted share of a step, within this share of a step.
_WITHIN: Final = 0.15
_IN_FLIGHT: Final = ("staleness.j=1", "staleness.k=8", "actor.groups_in_flight=24")


def slow_engine(options: EngineOptions) -> Engine:
    """Return a paced engine that takes twice as long as the usual one."""
    return engine(options, _SLOW.decode_s)


def fast_trainer() -> PacedTrainer:
    """Return a trainer that never limits a run here."""
    return PacedTrainer(token_s=0.0003)


def slow_trainer() -> PacedTrainer:
    """Return a trainer that takes longer than the engine."""
    return PacedTrainer(token_s=_SLOW_TOKEN_S)


def twice_as_fast() -> PacedTrainer:
    """Return `slow_trainer` on hardware that is twice as fast."""
    return PacedTrainer(token_s=_SLOW_TOKEN_S / 2)


def slow_reward(completions: Sequence[str]) -> list[float]:
    """Judge a group's answers alternately wrong and correct, after a while."""
    time.sleep(_VERIFY_S)
    return [float(place % 2) for place in range(len(completions))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run with a known bottleneck: the cause and the change to be named, and the overrides before and after it."""

    cause: str
    change: str
    before: tuple[str, ...]
    after: tuple[str, ...]


_FAST: Final = 'trainer.type="benchmarks.bottleneck:fast_trainer"'
_VERIFIER: Final = (
    'domains=[{name="divisors", source="addition", verifier="benchmarks.bottleneck:slow_reward", verifier_workers=%d}]'
)
CASES: Final[Mapping[str, Case]] = {
    "engine": Case(
        cause="engines",
        change="one more engine",
        before=('engine.type="benchmarks.bottleneck:slow_engine"', _FAST),
        after=("engine.count=2",),
    ),
    "trainer": Case(
        cause="the trainer",
        change="a trainer twice as fast",
        before=('trainer.type="benchmarks.bottleneck:slow_trainer"',),
        after=('trainer.type="benchmarks.bottleneck:twice_as_fast"',),
    ),
    "verifier": Case(
        cause="verifiers",
        change="twice the verifier workers",
        before=(_FAST, _VERIFIER % 1),
        after=(_VERIFIER % 2,),
    ),
}


def run(quick: bool = False) -> None:
    """Run every case before and after its change, print the table and, unless `quick`, write the record."""
    steps = 16 if quick else 30
    with tempfile.TemporaryDirectory(prefix="bottleneck-") as folder, ThreadPoolExecutor(len(CASES)) as pool:
        recipe, shared = paced_recipe(Path(folder)), (*_IN_FLIGHT, f"run.steps={steps}")

        def made(name: str, changes: Sequence[str]) -> Any:
            return paced_run(recipe, Path(folder) / name, [*shared, *changes])

        before = dict(zip(CASES, pool.map(made, CASES, (case.before for case in CASES.values())), strict=True))
        later = [f"{name}, changed" for name in CASES]
        both = [(*case.before, *case.after) for case in CASES.values()]
        after = dict(zip(CASES, pool.map(made, later, both), strict=True))
        record: dict[str, Any] = {}
        rows = []
        for name, case in CASES.items():
            found, actor_s = stretches(before[name].events)[-1], actor_seconds(Path(folder) / name / "paced")
            error, changes = tried(newest_part(before[name]), actor_s=actor_s)
            predicted = next(change for change in changes if change.name == case.change)
            now_s, then_s = measure(before[name].events).step_s, measure(after[name].events).step_s
            off = (predicted.step_s - then_s) / now_s
            record[name] = {
                "waits_for": found.waits_for,
                "recommended": changes[0].name,
                "step_s": now_s,
                "simulation_error": error,
                "predicted_s": predicted.step_s,
                "measured_s": then_s,
                "changes": {change.name: change.step_s for change in changes},
            }
            right = found.waits_for == case.cause and changes[0].step_s >= predicted.step_s * (1 - _WITHIN)
            words = f"{now_s:.2f} s; {case.change}: {predicted.step_s:.2f} predicted, {then_s:.2f} measured"
            rows.append(
                Row(
                    f"waits for {found.waits_for}",
                    words,
                    f"within {_WITHIN:.0%} of a step",
                    right and abs(off) <= _WITHIN,
                )
            )
    report("bottleneck", rows, record, quick=quick)
