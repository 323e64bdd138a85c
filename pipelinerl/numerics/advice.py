"""Advice on a run's train/inference mismatch: a few rules, each with its threshold, its reason and its source."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pipelinerl.numerics.causes import CONTRADICTION, Cause
from pipelinerl.numerics.review import CauseReview, Review

#: Accepted P95 of |Δ log-prob| between two programs that run the same weights in bf16.
NUMERICS_P95: Final = 0.01
#: PPO's usual clip, 1 ± 0.2. If P95 exceeds it, one stale token in twenty is outside the trust region.
STALENESS_P95: Final = math.log(1.2)
#: Number of updates that engines may lack because of rounding; a smaller gap is within the sampling noise of the probe.
BEHIND: Final = 1.0
#: Effective sample size, as a share of the tokens, below which uneven weights waste half of the tokens.
ESS: Final = 0.5
#: If the objective clips or masks more than this share of the tokens of one age, sampling such tokens is mostly wasted.
CUT: Final = 0.5
#: Remedies in recipe syntax. The cap C = 2 is the value that the TIS note's ablations use.
_TIS: Final = (
    'TIS: objective.is_weight = { kind = "token_ratio", numerator = "old", high = 2.0 }, and grad1.over = "old" where '
    'grad1 is a ratio (preset "ppo_tis")'
)
_CAPPED: Final = 'a capped weight: objective.is_weight = { kind = "token_ratio", high = 2.0 } with grad1 = "logprob"'
#: K1 should be positive. Sampling noise may take it below 0 by this share of K3; a lower value is reported.
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
    rules = {Cause.NUMERICS: _numerics, Cause.CACHE: _cache, Cause.STALENESS: _staleness}
    return [
        *_rounding(review),
        *(advice for each in by_weight for advice in rules[each.cause](each, review)),
        *_ages(review),
        *_ess(review),
    ]


def _stands_still(review: Review) -> bool:
    return review.rounding is not None and review.rounding.behind > BEHIND


def _rounding(review: Review) -> Iterator[Advice]:
    if review.rounding is not None and _stands_still(review):
        yield Advice(
            f"updates are lost to rounding: at step {review.rounding.worst_step} engines lacked "
            f"{review.rounding.behind:.1f} steps' worth of updates",
            'weights.rounding = "dithered", or engine.dtype = "float32" where memory allows (CPU: always)',
            "an update smaller than half the spacing of bfloat16 is rounded away, so the sampler is older than its "
            "version says (docs/understand/mismatch.md)",
        )


def _numerics(cause: CauseReview, review: Review) -> Iterator[Advice]:
    if _stands_still(review):  # rounding explains the gap; fixing the numerics would not close it
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
            f"a smaller staleness.k, a lower learning rate, or {_CAPPED}",
            "more than one in twenty of them lies outside PPO's trust region of 1 ± 0.2; k bounds their age "
            "(RLAX §3.1), the truncated ratio their weight",
        )


def _ages(review: Review) -> Iterator[Advice]:
    for age, shares in review.ages.items():
        cut = sum(shares.get(name, 0.0) for name in ("clipped", "masked"))
        if age != "0" and cut > CUT:
            youngest = int(age.split("_")[0])
            yield Advice(
                f"of the tokens {youngest} or more versions old, {cut:.0%} are clipped or masked",
                f"staleness.k = {youngest} or less",
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
