"""`measure`: the figures of a finished run, named as in `Prediction`; `simulated_like`: a comparable prediction.

Steps that overlap with an evaluation are excluded, since engines also answer the evaluation's questions. A run may take
dozens of steps to reach a steady state: with `drain`, groups are dropped until then, and sometimes again after a long
answer. A short run therefore differs from a long simulation, and how long its steps wait depends on the lengths that
were drawn. So the comparable prediction has as many steps as the run, and is the median of several simulations.
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

#: The fewest steps that allow a comparison.
_FEWEST: Final = 6
#: A simulation is trusted if its figures differ from the measured figures by at most this share.
TRUSTED: Final = 0.10
#: The figures that are compared to judge a simulation.
JUDGED: Final = ("step_s", "tokens_per_s")
#: The number of simulations whose median is used; odd, so that the median is one of them.
DRAWS: Final = 5


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Means over the counted steps, named as in `Prediction`.

    Attributes:
        compute_s: time of a step, except its wait for a publication.
        tokens: tokens of a step, including prompts.
        report_s: from the end of a step to the beginning of the next step.
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
        """Return simulated ÷ measured − 1 for the compared figures."""
        return {name: getattr(prediction, name) / getattr(self, name) - 1 for name in JUDGED}


def counted_steps(events: Sequence[Event]) -> list[tuple[Event, float]]:
    """Return the steps that count, each with the seconds since the previous step ended.

    Raises:
        UserError: too few steps count.
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
            f"expected at least {_FEWEST} steps after the first fifth without a concurrent evaluation, got "
            f"{len(counted)} of {len(steps)}: a run must be longer to be simulated"
        )
    return counted


def measure(events: Sequence[Event]) -> Measured:
    """Measure a finished run.

    Raises:
        UserError: the steps are too few, or lack required figures.
    """
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
            f"the run's steps do not report {error}: it was made by an older version of the project; run it again"
        ) from None


def _evaluations(events: Sequence[Event]) -> list[tuple[float, float]]:
    """Return the time span of each evaluation; an unfinished one ends at infinity."""
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
    """Simulate the run several times and return the prediction with the median time per step.

    Each simulation has as many steps as the events, and draws other lengths.
    """
    steps = len(tell(events).steps)
    runs = [simulate(replace(setting, steps=steps, seed=setting.seed + draw), hardware) for draw in range(DRAWS)]
    return sorted(runs, key=lambda run: run.step_s)[DRAWS // 2]
