"""What a simulated run came to: throughput, where time was lost, how old what trained was, what was thrown away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple, final

from pipelinerl.simulation.hardware import Prices

#: One step in so many, at the beginning, fills the pipeline and is left out of the figures, measured or simulated.
FILLS: Final = 5


class SimulatedStep(NamedTuple):
    """A step of the run: when it was taken, and what it waited for (seconds)."""

    ended: float
    rollouts: int
    sampled_tokens: int
    wait_s: float
    compute_s: float
    publish_wait_s: float
    staleness: Mapping[int, int]
    """Rollouts by the versions between their oldest token's and the one that the step made."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Orders by what became of them; `issued` = `trained` + `filtered` + `stale` + `failed` + `in_flight`."""

    issued: int
    trained: int
    filtered: int
    stale: int
    failed: int
    in_flight: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Figures of the steps after the first `skipped`, which fill the pipeline.

    Attributes:
        tokens_per_s, rollouts_per_s: that were trained. steps_per_hour. step_s: from one step to the next, mean.
        trainer_wait: share of the time that the trainer waits for rollouts; trainer_computes: that it computes;
            trainer_held: that it waits for a publication to end.
        engine_idle: share of the engines' time without a row. rows: rows of a decode step, mean.
        staleness: share of the trained rollouts by their age in versions. staleness_mean.
        discarded: of the tokens of groups that ended, those of stale ones.
        order_s: from an order's issue to its end, mean; in_flight: orders out, mean over time.
        cost_per_hour; cost_per_step; cost_per_million_tokens: 0 where no prices are told.
    """

    steps: int
    skipped: int
    seconds: float
    tokens_per_s: float
    rollouts_per_s: float
    steps_per_hour: float
    step_s: float
    trainer_wait: float
    trainer_computes: float
    trainer_held: float
    engine_idle: float
    rows: float
    staleness: Mapping[int, float]
    staleness_mean: float
    discarded: float
    order_s: float
    in_flight: float
    account: Account
    cost_per_hour: float = 0.0
    cost_per_step: float = 0.0
    cost_per_million_tokens: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON: keys are text."""
        return asdict(self) | {"staleness": {str(age): share for age, share in self.staleness.items()}}


def cost(prices: Prices, *, engines: int, step_s: float, tokens_per_s: float) -> dict[str, float]:
    """Of an hour, a step and a million trained tokens."""
    hour = prices.engine_hour * engines + prices.trainer_hour
    return {
        "cost_per_hour": hour,
        "cost_per_step": hour * step_s / 3600,
        "cost_per_million_tokens": hour / 3600 * 1e6 / tokens_per_s if tokens_per_s else 0.0,
    }


def staleness_of(steps: Sequence[SimulatedStep]) -> dict[int, float]:
    """Share of the rollouts by age, the youngest first."""
    counts: dict[int, int] = {}
    for step in steps:
        for age, rollouts in step.staleness.items():
            counts[age] = counts.get(age, 0) + rollouts
    total = sum(counts.values())
    return {age: counts[age] / total for age in sorted(counts)} if total else {}
