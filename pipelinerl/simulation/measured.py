"""`measure`: what a finished run's events say of itself, in the figures of a simulated `Prediction`; `simulated_like`:
the prediction to hold beside it, of as many steps, and not of one fortunate draw.

Steps in whose time an evaluation was under way are left out: engines then answer other questions. A schedule may take
dozens of steps to find its rhythm: a `drain` throws groups away until it has, and none later, or some again after a
long answer. A short run is all beginning, so that its steps are no mean over a long simulated one; and which of its
steps wait depends on the lengths that were drawn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import Any, Final, final

from pipelinerl.errors import UserError
from pipelinerl.observability.events import Event
from pipelinerl.observability.run_history import tell
from pipelinerl.simulation.hardware import Hardware
from pipelinerl.simulation.prediction import FILLS, Prediction
from pipelinerl.simulation.setting import SimulatedSetting
from pipelinerl.simulation.simulator import simulate

#: Fewer steps than these say nothing.
_FEWEST: Final = 6
#: A simulation is trusted beyond what was measured if it is within this of what was.
TRUSTED: Final = 0.10
#: The figures that it is judged by.
JUDGED: Final = ("step_s", "tokens_per_s")
#: Simulated runs, an odd number, of which the middle one stands for all.
DRAWS: Final = 5


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Means over the steps that count; named as in `Prediction`.

    Attributes:
        compute_s: a step without its wait for a publication. tokens: of a step, prompts included.
        report_s: from the end of a step to the next one's beginning.
    """

    steps: int
    step_s: float
    tokens_per_s: float
    trainer_wait: float
    staleness_mean: float
    discarded: float
    compute_s: float
    tokens: float
    sampled_tokens: float
    rollouts: float
    report_s: float

    def errors(self, prediction: Prediction) -> Mapping[str, float]:
        """Simulated ÷ measured − 1, of the figures that a simulation is judged by."""
        return {name: getattr(prediction, name) / getattr(self, name) - 1 for name in JUDGED}


def counted_steps(events: Sequence[Event]) -> list[tuple[Event, float]]:
    """The steps that count, each with the seconds since the step before it ended.

    Raises:
        UserError: they are too few.
    """
    steps = tell(events).steps
    evaluations = _evaluations(events)
    pairs = [(after, _at(after) - _at(before)) for before, after in pairwise(steps)]
    counted = [
        (step, seconds)
        for step, seconds in pairs[max(0, len(steps) // FILLS - 1) :]
        if seconds > 0 and not any(since < _at(step) and until > _at(step) - seconds for since, until in evaluations)
    ]
    if len(counted) < _FEWEST:
        raise UserError(
            f"expected at least {_FEWEST} steps after the first fifth without an evaluation beside them, got "
            f"{len(counted)} of {len(steps)}: a run must be longer to be simulated"
        )
    return counted


def measure(events: Sequence[Event]) -> Measured:
    """Raises UserError where the steps are too few, or do not report what is needed."""
    counted = counted_steps(events)
    steps, seconds = [step for step, _ in counted], sum(period for _, period in counted)
    try:
        compute = [float(step["step_s"]) - float(step["publish_wait_s"]) for step in steps]
        waits = [float(step["wait_s"]) for step in steps]
        idle = [period - float(step["step_s"]) - float(step["wait_s"]) for step, period in counted]
        sampled = [float(step["sampled_tokens"]) for step in steps]
        stale = float(steps[-1]["stale_tokens"]) - float(steps[0]["stale_tokens"])
        return Measured(
            steps=len(steps),
            step_s=seconds / len(steps),
            tokens_per_s=sum(sampled) / seconds,
            trainer_wait=sum(waits) / seconds,
            staleness_mean=fmean(float(step["staleness_mean"]) for step in steps),
            discarded=stale / (stale + sum(sampled[1:])),
            compute_s=fmean(compute),
            tokens=fmean(float(step["tokens"]) for step in steps),
            sampled_tokens=fmean(sampled),
            rollouts=fmean(float(step["rollouts"]) for step in steps),
            report_s=max(0.0, fmean(idle)),
        )
    except KeyError as error:
        raise UserError(
            f"the run's steps do not report {error}: it was made by an older version of the project; make it anew"
        ) from None


def _evaluations(events: Sequence[Event]) -> list[tuple[float, float]]:
    """From when to when each was under way; one that did not end goes on."""
    spans: list[tuple[float, float]] = []
    began: float | None = None
    for event in events:
        if event["kind"] == "evaluation_began":
            began = _at(event)
        elif event["kind"] == "evaluation" and began is not None:
            spans.append((began, _at(event)))
            began = None
    return spans if began is None else [*spans, (began, float("inf"))]


def _at(event: Mapping[str, Any]) -> float:
    return float(event.get("elapsed_s") or 0.0)


def simulated_like(events: Sequence[Event], setting: SimulatedSetting, hardware: Hardware) -> Prediction:
    """Of as many steps as the events tell: of runs that differ in their draws, the one whose steps last middlingly."""
    steps = len(tell(events).steps)
    runs = [simulate(replace(setting, steps=steps, seed=setting.seed + draw), hardware) for draw in range(DRAWS)]
    return sorted(runs, key=lambda run: run.step_s)[DRAWS // 2]
