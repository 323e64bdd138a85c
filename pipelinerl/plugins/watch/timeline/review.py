"""Summary of a run's train/inference mismatch from the metrics of its steps, and advice on it. Pure functions.

A figure is one statistic of the mismatch, such as its P95. It is reported at the start, middle and end of the run (the
median over a tenth of the steps), and at its worst step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Final

from pipelinerl.numerics.causes import CONTRADICTION, Cause
from pipelinerl.observability.run_history import RunHistory, Series
from pipelinerl.staleness import LOCKSTEP

#: The statistics reported for each cause, with their labels, in display order.
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
#: Metric prefix → the name of the trainer's log-probs that these metrics compare with the sampler's.
COMPARED: Final[Mapping[str, str]] = {"mismatch": "current", "old_mismatch": "old"}


@dataclass(frozen=True, slots=True)
class MetricSeries:
    """One statistic of the mismatch over the run; `median` is over all steps that report the statistic."""

    start: float
    middle: float
    end: float
    median: float
    worst: float
    worst_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseReview:
    """Summary of one cause of the mismatch: its mean share of a step's tokens, and each statistic's series by name."""

    cause: Cause
    share: float
    figures: Mapping[str, MetricSeries]

    def median(self, figure: str) -> float:
        """Return the median of the named figure over the steps."""
        return self.figures[figure].median


@dataclass(frozen=True, slots=True)
class RoundingReview:
    """The share of the trainer's updates that engines saw after the weights were rounded for transfer.

    A step of which engines see the share s leaves them 1 − s updates further behind. `behind` is the largest sum of
    these shortfalls, reached at `worst_step`: about 0 if rounding is unbiased. `share` is the series of s.
    """

    behind: float
    worst_step: int
    share: MetricSeries


@dataclass(frozen=True, slots=True, kw_only=True)
class Review:
    """Summary of one run.

    Attributes:
        run: the run's name. steps: the number of steps that recorded a mismatch.
        current, old: by cause, how the trainer's log-probs at the step (`current`) or its recomputed log-probs (`old`)
            differ from the sampler's.
        ages: for each bucket of ages (`0`, `3_4`), its share of the tokens, and the shares of its tokens that the
            objective clipped, truncated or masked; means over the run.
        ess: effective sample size over all tokens; None if it was never measured.
        rounding: the effect of rounding on weights sent in bfloat16; None if no weights were rounded.
    """

    run: str
    steps: int
    current: Mapping[Cause, CauseReview]
    old: Mapping[Cause, CauseReview]
    ages: Mapping[str, Mapping[str, float]]
    ess: MetricSeries | None
    rounding: RoundingReview | None = None


def review(history: RunHistory) -> Review | None:
    """Summarize the mismatch of a run; return None if no step recorded one."""
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
        ess=_series("ess", ess) if ess else None,
        rounding=_rounding(history),
    )


def _rounding(history: RunHistory) -> RoundingReview | None:
    shares = history.by_step("sent_share")
    if not shares:
        return None
    lacking = list(accumulate(1 - share for share in shares.y))
    behind = max(lacking)
    return RoundingReview(behind, int(shares.x[lacking.index(behind)]), _series("sent_share", shares))


def _causes(history: RunHistory, prefix: str, steps: int) -> Iterator[tuple[Cause, CauseReview]]:
    for cause in Cause:
        share = history.by_step(f"{prefix}_{cause}_share")
        if share:
            series = {name: history.by_step(f"{prefix}_{cause}_{name}") for name in FIGURES}
            figures = {name: _series(name, each) for name, each in series.items() if each}
            yield cause, CauseReview(cause=cause, share=sum(share.y) / steps, figures=figures)


def _series(name: str, series: Series) -> MetricSeries:
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
    """Return `Review.ages`; clipped, truncated and masked shares are weighted by the age's share of a step's tokens."""
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


#: Accepted P95 of |Δ log-prob| between two programs that run the same weights in bf16.
NUMERICS_P95: Final = 0.01
#: PPO's usual clip, 1 ± 0.2. If P95 exceeds it, one stale token in twenty is outside the trust region.
STALENESS_P95: Final = math.log(1.2)
#: Number of updates that engines may lack because of rounding; smaller values are sampling noise of the probe.
BEHIND: Final = 1.0
#: Smallest accepted effective sample size, as a share of the tokens; below it, over half of the tokens are wasted.
ESS: Final = 0.5
#: Largest accepted share of the tokens of one age that the objective clips or masks; above it, most are wasted.
CUT: Final = 0.5
#: Text of a remedy, in recipe syntax: truncated importance sampling with the cap C = 2, as in the ablations of the TIS
#: note (Yao et al. 2025).
_TIS: Final = (
    'TIS: objective.is_weight = { kind = "token_ratio", numerator = "old", high = 2.0 }, and grad1.over = "old" where '
    'grad1 is a ratio (preset "ppo_tis")'
)
_CAPPED: Final = 'a capped weight: objective.is_weight = { kind = "token_ratio", high = 2.0 } with grad1 = "logprob"'
#: K1 should be positive. A value below −`_K1_OF_K3` · K3 is lower than sampling noise explains, and is reported.
_K1_OF_K3: Final = 0.5


@dataclass(frozen=True, slots=True)
class Advice:
    """One piece of advice: the finding, the remedy, and the reason why the remedy helps."""

    finding: str
    do: str
    because: str


def advise(review: Review) -> list[Advice]:
    """Return the advice of all rules for a run, most important first; [] if there is none."""
    by_weight = sorted(review.current.values(), key=lambda each: each.share * each.median("mean"), reverse=True)
    truncated, numerics = (review.current.get(cause) for cause in (Cause.TRUNCATION, Cause.NUMERICS))
    if truncated is not None and (numerics is None or numerics.share < truncated.share):
        return [_truncation(truncated)]  # all other figures contain it, too
    rules = {Cause.NUMERICS: _numerics, Cause.CACHE: _cache, Cause.STALENESS: _staleness}
    return [
        *_on_rounding(review),
        *(advice for each in by_weight if each.cause in rules for advice in rules[each.cause](each, review)),
        *_on_ages(review),
        *_ess(review),
    ]


def _stands_still(review: Review) -> bool:
    return review.rounding is not None and review.rounding.behind > BEHIND


def _on_rounding(review: Review) -> Iterator[Advice]:
    if review.rounding is not None and _stands_still(review):
        yield Advice(
            f"updates are lost to rounding: at step {review.rounding.worst_step} engines lacked "
            f"{review.rounding.behind:.1f} steps' worth of updates",
            'weights.rounding = "dithered", or engine.dtype = "float32" where memory allows (CPU: always)',
            "an update smaller than half the spacing of bfloat16 is rounded away, so the sampler is older than its "
            "version says (docs/understand/mismatch.md)",
        )


def _truncation(cause: CauseReview) -> Advice:
    mean = cause.median("mean")
    return Advice(
        f"on nearly every token of the same version, the sampler's log-prob exceeds the trainer's, by {mean:.2g} nats "
        "on average: they are those of a truncated distribution",
        "sampling.top_p = 1 and sampling.top_k = 0, or an engine that reports policy_logprobs (pipelinerl conformance "
        "engine URL); no server default of min_p, and no grammar",
        "probabilities after a truncation are divided by the mass that it keeps, which makes every ratio too small and "
        "clips tokens of negative advantage (docs/understand/mismatch.md)",
    )


def _numerics(cause: CauseReview, review: Review) -> Iterator[Advice]:
    if _stands_still(review):  # if rounding explains the mismatch, advice on numerics would not help
        return
    p95, contradictions = cause.median("p95"), cause.figures["contradictions"]
    if p95 > NUMERICS_P95:
        yield Advice(
            f"tokens of the trainer's own version differ by {p95:.2g} at P95 (accepted: {NUMERICS_P95:g})",
            f'model.head_precision = "fp32", unless it is; if the gap stays, {_TIS}',
            "the output layer causes most of the rounding error (MiniMax-M1); the truncated ratio corrects the rest, "
            "from other kernels, quantised weights or parallel layouts (TIS note)",
        )
    elif contradictions.worst > 0:
        yield Advice(
            f"at step {contradictions.worst_step}, {contradictions.worst:.1%} of the responses had a token whose "
            f"probability differs by more than {CONTRADICTION:g} at the same version",
            _TIS,
            "single contradictions are rare, more frequent in longer responses, and corrected by truncation "
            "(TIS note, figures 7 to 10)",
        )
    k1, k3 = cause.median("k1"), cause.median("k3")
    if p95 > NUMERICS_P95 and k1 < -_K1_OF_K3 * k3:
        yield Advice(
            f"K1 of the trainer's own version is negative ({k1:.2g}, K3 {k3:.2g})",
            "check that the sampler reports the log-probs of what it samples from: temperature, top-p, quantisation",
            "K1 estimates a divergence, below 0 only if tokens come from another distribution than reported (TIS note)",
        )


def _cache(cause: CauseReview, review: Review) -> Iterator[Advice]:
    p95 = cause.median("p95")
    own = review.current.get(Cause.NUMERICS)
    if p95 > STALENESS_P95 and (own is None or p95 > 2 * own.median("p95")):
        yield Advice(
            f"tokens sampled on an older version's keys and values differ by {p95:.2g} at P95",
            'engine.on_update = "recompute_kv"',
            "a fresh prefill takes the older version out of the cache (LlamaRL); it costs a prefill for each update",
        )


def _staleness(cause: CauseReview, review: Review) -> Iterator[Advice]:
    p95 = cause.median("p95")
    if p95 > STALENESS_P95:
        yield Advice(
            f"tokens of older versions differ by {p95:.2g} at P95, beyond log 1.2 = {STALENESS_P95:.2f}",
            f"a staleness.k below their age, a lower learning rate, or {_CAPPED}",
            "more than one in twenty of them lies outside PPO's trust region of 1 ± 0.2; k bounds their age "
            "(RLAX §3.1), the truncated ratio their weight",
        )


def _on_ages(review: Review) -> Iterator[Advice]:
    for age, shares in review.ages.items():
        cut = sum(shares.get(name, 0.0) for name in ("clipped", "masked"))
        youngest = int(age.split("_")[0])
        if youngest > LOCKSTEP and cut > CUT:
            yield Advice(
                f"of the tokens of staleness {youngest} or more (1 = on policy), {cut:.0%} are clipped or masked",
                f"staleness.k = {youngest - 1} or less",
                "they were sampled and verified, and then have no gradient",
            )
            return


def _ess(review: Review) -> Iterator[Advice]:
    if review.ess is not None and review.ess.median < ESS:
        yield Advice(
            f"the effective sample size is {review.ess.median:.0%} of the tokens",
            f"a lower learning rate, a smaller staleness.k, or {_CAPPED}",
            "few tokens carry most of the weight, so the gradient is noisier than its batch size says",
        )
