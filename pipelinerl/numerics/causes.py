"""The train/inference mismatch of one step, split by cause: pure functions of its micro-batches and log-probs.

Two weight versions are known for each token: the one that sampled it, and the one that sampled the first token of its
turn. They tell why the trainer's log-prob of the token differs from the sampler's:

    numerics    the trainer's version sampled the turn up to this token: only kernels and dtypes differ
    truncation  as numerics, in a step in which nearly all differences have the sign of a truncated distribution
    cache       the trainer's version sampled the token, but an older version wrote part of the KV cache
                (an in-flight update in the mode `continue`)
    staleness   an older version sampled the token

Other tools call numerics and cache together "same version".

A sampler that reports log-probs after top-p, top-k or a grammar divides each probability by the mass M that it keeps,
so log π_trainer − log π_sampler = log M ≤ 0 for every token. Rounding gives differences of both signs: their mean, the
estimate K1, is small against the mean of their absolute values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trainer_contract.types import Bool, Float32, MicroBatch


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Statistics that compare two policies, `ours` and `theirs`, on tokens sampled from `theirs`.

    With d = log π_ours − log π_theirs and r = exp(d):

    Attributes:
        mean, p50, p95, max: statistics of |d|, in nats (RLAX, figure 5, reports mean and P95).
        max_probability: the largest |π_ours − π_theirs| (the TIS note, Yao et al. 2025, figure 1).
        k1, k3: estimates of KL(theirs ‖ ours), −mean(d) and mean(r − 1 − d) (Schulman 2020).
        ess: effective sample size of the weights r as a fraction of the tokens, (Σr)² / (N·Σr²).
    """

    num_tokens: int
    mean: float
    p50: float
    p95: float
    max: float
    max_probability: float
    k1: float
    k3: float
    ess: float


_OF_NOTHING = Mismatch(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)


def mismatch(ours: NDArray[np.floating[Any]], theirs: NDArray[np.floating[Any]]) -> Mismatch:
    """Compare log-probs `ours` [N] with `theirs` [N]; of no tokens they agree. Raises ValueError if shapes differ."""
    if ours.shape != theirs.shape:
        raise ValueError(f"expected log-probs of the same tokens, got shapes {ours.shape} and {theirs.shape}")
    if ours.size == 0:
        return _OF_NOTHING
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    difference = a - b
    ratio, distance = np.exp(difference), np.sort(np.abs(difference))
    p50, p95 = np.interp((0.5 * (a.size - 1), 0.95 * (a.size - 1)), np.arange(a.size), distance)
    return Mismatch(
        num_tokens=ours.size,
        mean=float(distance.mean()),
        p50=float(p50),
        p95=float(p95),
        max=float(distance[-1]),
        max_probability=float(np.abs(np.exp(a) - np.exp(b)).max()),
        k1=float(-difference.mean()),
        k3=float((np.expm1(difference) - difference).mean()),
        ess=float(ratio.mean() ** 2 / (ratio**2).mean()),
    )


Integers = NDArray[np.integer[Any]]

#: A step's own-version tokens differ by truncation if at least this many of them have a mean |difference| of
#: `_TRUNCATES` nats, of which the share `_ONE_SIDED` does not cancel in the mean difference.
_ENOUGH: Final = 32
_TRUNCATES: Final = 1e-3
_ONE_SIDED: Final = 0.9

#: If a token's probabilities by trainer and sampler differ by more than this, that is a contradiction (TIS note,
#: figures 7 and 8).
CONTRADICTION: Final = 0.5
#: Upper bounds of the buckets of tokens' ages in versions; the buckets are 1 (on policy), 2, 3–4, 5–8, …
_AGES: Final = 2 ** np.arange(31)


class Cause(StrEnum):
    """Reason why the trainer's log-prob of a sampled token differs from the sampler's."""

    NUMERICS = "numerics"
    TRUNCATION = "truncation"
    CACHE = "cache"
    STALENESS = "staleness"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """The trained tokens of all micro-batches of a step, as arrays with one entry per token, [N].

    Attributes:
        logprobs: f32, by the trainer's weights at the step. behavior_logprobs: f32, by the sampler.
        old_logprobs: f32, recomputed by the trainer; None if the objective does not need them.
        versions: version of the weights that sampled each token.
        turn_versions: version of the weights that sampled the first token of the token's turn.
        responses: index of the token's response within the step.
    """

    logprobs: Float32
    behavior_logprobs: Float32
    old_logprobs: Float32 | None
    versions: Integers
    turn_versions: Integers
    responses: Integers

    def causes(self, held_version: int) -> dict[Cause, Bool]:
        """Return for each cause the mask of its tokens, bool [N]; the trainer's weights have version `held_version`."""
        same = self.versions == held_version
        own = same & (self.turn_versions == held_version)
        cause = Cause.NUMERICS
        if own.sum() >= _ENOUGH:
            # The sampler's log-probs of a truncated distribution exceed the trainer's.
            difference = self.behavior_logprobs[own].astype(np.float64) - self.logprobs[own]
            mean = float(np.abs(difference).mean())
            if mean > _TRUNCATES and float(difference.mean()) > _ONE_SIDED * mean:
                cause = Cause.TRUNCATION
        return {cause: own, Cause.CACHE: same & ~own, Cause.STALENESS: ~same}


def sampled_tokens(micro_batches: Sequence[MicroBatch], logprobs: Sequence[Float32]) -> SampledTokens | None:
    """Concatenate the trained tokens, with the trainer's log-probs f32 [T]; None without tokens or versions."""
    if any(batch.behavior_versions is None for batch in micro_batches):
        return None
    mask = np.concatenate([np.zeros(0, bool), *(batch.loss_mask for batch in micro_batches)])
    if not mask.any():
        return None

    def joined(name: str) -> Any:
        return np.concatenate([getattr(batch, name) for batch in micro_batches])

    # The first token of a segment is not predicted, so a turn never begins on the first token of a micro-batch.
    begins = np.concatenate(([False], mask[1:] & ~mask[:-1]))[mask]
    versions = joined("behavior_versions")[mask]
    return SampledTokens(
        logprobs=np.concatenate(logprobs)[mask],
        behavior_logprobs=joined("behavior_logprobs")[mask],
        old_logprobs=None if micro_batches[0].old_logprobs is None else joined("old_logprobs")[mask],
        versions=versions,
        turn_versions=versions[begins][np.cumsum(begins) - 1],
        responses=np.cumsum(joined("position_ids") == 0)[mask],
    )


def figures(tokens: SampledTokens | None, *, held_version: int, cuts: Mapping[str, Bool]) -> dict[str, float]:
    """Return the mismatch metrics of a step; causes and ages without tokens are left out.

    `mismatch_<cause>_<figure>` compares the sampler's log-probs with the trainer's at the step;
    `old_mismatch_<cause>_<figure>` compares the sampler's with π_old's, which the trainer recomputed. A token's Δp is
    the difference of the two compared probabilities. The figures are:

        share                           share of the trained tokens
        mean p50 p95 max k1 k3 ess      as in `Mismatch`
        response_max, response_mean     largest |Δp|, or mean |Δp|, of a response; mean over the responses (TIS note)
        contradictions                  share of responses with a |Δp| above `CONTRADICTION`

    For `age_<ages>_<figure>` see `by_age`.

    Args:
        held_version: version of the weights that computed the trainer's log-probs.
        cuts: for each treatment by the objective (`clipped`, `truncated`, `masked`), the mask of its tokens, bool [N].
    """
    if tokens is None:
        return {}
    metrics: dict[str, float] = {}
    references = {"mismatch": tokens.logprobs, "old_mismatch": tokens.old_logprobs}
    for cause, members in tokens.causes(held_version).items():
        if not members.any():
            continue
        behavior, responses = tokens.behavior_logprobs[members], tokens.responses[members]
        for name, ours in references.items():
            if ours is not None:
                prefix = f"{name}_{cause}"
                metrics[f"{prefix}_share"] = float(members.mean())
                for figure, value in _compared(ours[members], behavior, responses).items():
                    metrics[f"{prefix}_{figure}"] = value
    return metrics | by_age(held_version + 1 - tokens.versions, cuts)


def _compared(ours: Float32, theirs: Float32, responses: Integers) -> dict[str, float]:
    all_tokens = mismatch(ours, theirs)
    starts = np.flatnonzero(np.diff(responses, prepend=-1))
    difference = np.abs(np.exp(ours, dtype=np.float64) - np.exp(theirs, dtype=np.float64))
    worst = np.maximum.reduceat(difference, starts)
    mean = np.add.reduceat(difference, starts) / np.diff(starts, append=len(responses))
    names = ("mean", "p50", "p95", "max", "k1", "k3", "ess")
    return {name: getattr(all_tokens, name) for name in names} | {
        "response_max": float(worst.mean()),
        "response_mean": float(mean.mean()),
        "contradictions": float((worst > CONTRADICTION).mean()),
    }


def by_age(ages: Integers, cuts: Mapping[str, Bool]) -> dict[str, float]:
    """Return the metrics `age_<ages>_<figure>` of tokens in buckets by age.

    `ages` [N] holds each token's age: the version that the step makes, minus the version that sampled the token; 1 is
    on policy (as in `StalenessBounds`). The figure `share` is a bucket's share of all tokens. Each name in `cuts` is a
    figure, too: the share of the bucket's tokens that are in that mask, bool [N].
    """
    buckets = np.searchsorted(_AGES, np.maximum(ages, 1))
    counts = np.bincount(buckets)
    shares = {"share": counts / len(ages)} | {
        name: np.bincount(buckets, weights=cut, minlength=len(counts)) / np.maximum(counts, 1)
        for name, cut in cuts.items()
    }
    return {
        f"age_{_ages(bucket)}_{name}": float(share[bucket])
        for bucket in np.flatnonzero(counts).tolist()
        for name, share in shares.items()
    }


def _ages(bucket: int) -> str:
    last = int(_AGES[bucket])
    first = int(_AGES[bucket - 1]) + 1 if bucket else last
    return str(last) if first == last else f"{first}_{last}"
