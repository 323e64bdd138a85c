"""Results of a simulated run: throughput, lost time, staleness and discarded work; and sweeps over settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, NamedTuple

from pipelinerl.errors import UserError
from pipelinerl.observability.status import LedgerStatus
from pipelinerl.plugins.simulation.hardware import Prices

#: The pipeline fills during the first 1/`FILLS` of the steps; all results, measured or simulated, exclude these steps.
FILLS: Final = 5


class SimulatedStep(NamedTuple):
    """A step of the run: when it ended, what it trained on, and how long it waited and computed; times in seconds."""

    ended: float
    rollouts: int
    sampled_tokens: int
    wait_s: float
    compute_s: float
    publish_wait_s: float
    staleness: Mapping[int, int]
    """Rollouts by age, in versions between their oldest token and the version that the step made."""
    learning: float = 1.0
    """The learning of the step, as a share of that of an on-policy step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Results of a simulated run.

    `steps`, `seconds` and `account` (ordered groups by outcome) are of the whole run. All other figures leave out the
    first `skipped` steps, in which the pipeline fills.

    Attributes:
        trainer_wait: share of time in which the trainer waits for rollouts.
        trainer_computes: share of time in which the trainer computes.
        trainer_held: share of time in which the trainer waits for a publication to end.
        engine_idle: share of the engines' time in which they have no rows.
        staleness: shares of the trained rollouts, by age in versions.
        discarded: share of wasted tokens d / (d + t): d tokens in sampled groups too old to train on, t trained tokens.
        learning: what a step teaches, as a share of what it would teach on policy; 1 if the cost of lag is unknown.
        ahead: steps whose rollouts are in flight, and `j` the versions between publications, at the end of the run.
        mean_length: mean length of the trained answers in tokens.
        order_s: mean time from the order for a group until the group is trained or dropped.
        cost_per_hour, cost_per_step, cost_per_million_tokens: 0 if prices are unknown.
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
    learning: float
    ahead: float
    j: int
    mean_length: float
    order_s: float
    in_flight: float
    account: LedgerStatus
    cost_per_hour: float = 0.0
    cost_per_step: float = 0.0
    cost_per_million_tokens: float = 0.0


def cost(prices: Prices, *, engines: int, step_s: float, tokens_per_s: float) -> dict[str, float]:
    """Return the cost of an hour, a step and a million trained tokens."""
    hour = prices.engine_hour * engines + prices.trainer_hour
    return {
        "cost_per_hour": hour,
        "cost_per_step": hour * step_s / 3600,
        "cost_per_million_tokens": hour / 3600 * 1e6 / tokens_per_s if tokens_per_s else 0.0,
    }


def staleness_of(steps: Sequence[SimulatedStep]) -> dict[int, float]:
    """Return the share of rollouts by age in versions, lowest age first."""
    counts: Counter[int] = Counter()
    for step in steps:
        counts.update(step.staleness)
    return {age: counts[age] / counts.total() for age in sorted(counts)}


#: Settings slower than the fastest by at most this share count as equally fast.
_AS_FAST: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A recipe with changes `section.key=value`, and its prediction or the reason why it cannot run."""

    changes: tuple[str, ...]
    engines: int = 0
    prediction: Prediction | None = None
    refusal: str = ""


def grid(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all combinations of the values of axes `section.key=value,value,…`; the first axis varies slowest.

    Raises UserError if an axis is invalid.
    """
    values: list[list[str]] = []
    for axis in axes:
        key, separator, several = axis.partition("=")
        if not (separator and "." in key and all(value.strip() for value in several.split(","))):
            raise UserError(f"--sweep takes section.key=value,value,… such as engine.count=1,2,4, got {axis!r}")
        values.append([f"{key.strip()}={value.strip()}" for value in several.split(",")])
    return list(product(*values))


def recommended(trials: Sequence[Trial]) -> Trial | None:
    """Return the cheapest of the trials that are nearly as fast as the fastest; of equally cheap ones, the least stale.

    Without prices, the trial with the fewest engines is the cheapest. None if no trial can run.
    """
    ran = [(trial, trial.prediction) for trial in trials if trial.prediction is not None]
    if not ran:
        return None
    enough = (1 - _AS_FAST) * max(prediction.tokens_per_s for _, prediction in ran)
    fast = [(trial, prediction) for trial, prediction in ran if prediction.tokens_per_s >= enough]
    best = min(
        fast, key=lambda each: (each[1].cost_per_million_tokens, each[0].engines, round(each[1].staleness_mean, 1))
    )
    return best[0]
