"""Summary of a whole run's train/inference mismatch from the metrics of its steps (`causes.figures`). Pure.

Each figure is reported at the start, middle and end of the run, as the median over a tenth of its steps, and at its
worst step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import accumulate
from statistics import median
from typing import Any, Final

from pipelinerl.numerics.causes import Cause
from pipelinerl.observability.run_history import RunHistory, Series

#: The figures that are reported for a cause, with their labels, in display order.
FIGURES: Final[Mapping[str, str]] = {
    "mean": "mean |Δ log-prob|",
    "p50": "P50 |Δ log-prob|",
    "p95": "P95 |Δ log-prob|",
    "max": "max |Δ log-prob|",
    "response_max": "max |Δp| of a response",
    "response_mean": "mean |Δp| of a response",
    "contradictions": "responses with |Δp| > ½",
    "k1": "K1",
    "k3": "K3",
    "ess": "ESS",
}
#: Prefix of the metrics → the name of the trainer's log-probs that they compare with the sampler's.
COMPARED: Final[Mapping[str, str]] = {"mismatch": "current", "old_mismatch": "old"}


@dataclass(frozen=True, slots=True)
class MetricSeries:
    """One figure over the run; `median` is taken over all steps that report the figure."""

    start: float
    middle: float
    end: float
    median: float
    worst: float
    worst_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseReview:
    """Summary of one cause: its share of the tokens, averaged over all steps, and the series of each figure, by
    name.
    """

    cause: Cause
    share: float
    figures: Mapping[str, MetricSeries]

    def median(self, figure: str) -> float:
        """Return the median of the named figure over the steps."""
        return self.figures[figure].median


@dataclass(frozen=True, slots=True)
class RoundingReview:
    """The share of the trainer's updates that engines saw after the weights were rounded for transfer.

    `behind` is the largest number of updates that engines lacked at any step: the largest sum of 1 − `sent_share` since
    the first step. `worst_step` is the step at which the sum was largest. `behind` is about 0 when rounding is
    unbiased.
    """

    behind: float
    worst_step: int
    share: MetricSeries


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """Summary of one run.

    Attributes:
        run: the run's name. steps: the number of steps with figures.
        current, old: by cause, the trainer's log-probs against the sampler's. `current` uses the log-probs at the step,
            `old` the recomputed ones.
        ages: for each age (`0`, `3_4`), its share of the tokens and the shares that the objective cut, as run means.
        ess: series of the effective sample size over all tokens; None if it was never measured.
        rounding: the effect of rounding on weights sent in bfloat16; None if no weights were rounded.
    """

    run: str
    steps: int
    current: Mapping[Cause, CauseReview]
    old: Mapping[Cause, CauseReview]
    ages: Mapping[str, Mapping[str, float]]
    ess: MetricSeries | None
    rounding: RoundingReview | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the review as JSON-compatible values, for other programs."""
        return asdict(self)


def review(history: RunHistory) -> Review | None:
    """Summarize the mismatch of a run; return None if no step has figures."""
    measured = [step for step in history.steps if any(key.startswith("mismatch_") for key in step)]
    if not measured:
        return None
    ess = history.by_step("ess")
    return Review(
        run=history.run,
        steps=len(measured),
        current=dict(_causes(history, "mismatch", len(measured))),
        old=dict(_causes(history, "old_mismatch", len(measured))),
        ages=_ages(history, len(measured)),
        ess=_course("ess", ess) if ess else None,
        rounding=_rounding(history),
    )


def _rounding(history: RunHistory) -> RoundingReview | None:
    shares = history.by_step("sent_share")
    if not shares:
        return None
    lacking = list(accumulate(1 - share for share in shares.y))
    behind = max(lacking)
    return RoundingReview(behind, int(shares.x[lacking.index(behind)]), _course("sent_share", shares))


def _causes(history: RunHistory, prefix: str, steps: int) -> Iterator[tuple[Cause, CauseReview]]:
    for cause in Cause:
        share = history.by_step(f"{prefix}_{cause}_share")
        if share:
            series = {name: history.by_step(f"{prefix}_{cause}_{name}") for name in FIGURES}
            courses = {name: _course(name, each) for name, each in series.items() if each}
            yield cause, CauseReview(cause=cause, share=sum(share.y) / steps, figures=courses)


def _course(name: str, series: Series) -> MetricSeries:
    values, tenth = series.y, max(1, len(series.y) // 10)
    half = (len(values) - tenth) // 2
    badness = [-value if name == "ess" else abs(value) for value in values]
    worst = badness.index(max(badness))
    return MetricSeries(
        start=median(values[:tenth]),
        middle=median(values[half : half + tenth]),
        end=median(values[-tenth:]),
        median=median(values),
        worst=values[worst],
        worst_step=int(series.x[worst]),
    )


def _ages(history: RunHistory, steps: int) -> dict[str, dict[str, float]]:
    """Return the shares of each age as means over all tokens of the run.

    Each step is weighted by the share of its tokens that have the age.
    """
    keys = {key for step in history.steps for key in step if key.startswith("age_") and key.endswith("_share")}
    ages = (key.removeprefix("age_").removesuffix("_share") for key in keys)
    by_age: dict[str, dict[str, float]] = {}
    for age in sorted(ages, key=lambda age: int(age.split("_")[0])):
        share = history.by_step(f"age_{age}_share")
        total = sum(share.y)
        by_age[age] = {"share": total / steps}
        for name in ("clipped", "truncated", "masked"):
            cut = history.by_step(f"age_{age}_{name}")
            if cut.x == share.x and total > 0:
                by_age[age][name] = sum(a * b for a, b in zip(share.y, cut.y, strict=True)) / total
    return by_age
