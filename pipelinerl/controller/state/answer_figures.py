"""Metrics of the answers to held-out problems: in total, by domain and by tag. Pure functions.

    pass@k   probability that at least one of k samples is correct     unbiased (`pass_at_k`)
    maj@k    probability that the majority answer of k samples is      unbiased: mean over the n − k + 1 windows of k
             correct (self-consistency, Wang et al. 2023)              consecutive samples (samples are exchangeable)

Samples without a verdict are excluded from n, for pass@k and for maj@k. Ties between answers go to the one that occurs
first. Empty answers do not vote; k samples without any vote count as wrong. If no sample of a domain has an answer, its
verifier does not extract answers, and maj@k is omitted.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from pipelinerl import rng
from pipelinerl.messages import EvaluationDone

#: The most tags that get metrics of their own; the tags with the most problems are chosen.
MOST_TAGS: Final = 24
#: The smallest k for maj@k. With k = 2 the first answer wins every tie, so the majority is always the first sample.
LEAST_MAJORITY: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PassAt:
    """pass@k or maj@k: the mean over the problems with verdicts on at least k samples, with its 95 % interval."""

    k: int
    value: float
    low: float
    high: float
    problems: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFigures:
    """Metrics of the answers to a set of problems.

    Attributes:
        problems: number of problems with a verdict on at least one sample.
        accuracy: mean over these problems of the share of correct samples, with its 95 % interval; None if there
            are no such problems.
        pass_at, majority_at: one entry for each requested k for which at least one problem has enough samples.
        length_mean, length_p95: tokens per sample, over all samples; None if no length is known.
        truncated: share of all samples that were cut off by the token limit.
    """

    problems: int = 0
    accuracy: float | None = None
    low: float | None = None
    high: float | None = None
    pass_at: list[PassAt] = field(default_factory=list)
    majority_at: list[PassAt] = field(default_factory=list)
    length_mean: float | None = None
    length_p95: float | None = None
    truncated: float | None = None


def figures_of(answers: Sequence[EvaluationDone], *, pass_at: Iterable[int], seed: int) -> AnswerFigures:
    """Compute the metrics of `answers`; `seed` determines the bootstrap intervals."""
    ks = tuple(pass_at)
    judged = [answer for answer in answers if answer.judged]
    accuracy, low, high = estimate([answer.correct / answer.judged for answer in judged], seed=seed)
    lengths = np.array([length for answer in answers for length in answer.lengths])
    samples = sum(len(answer.right) or answer.judged for answer in answers)
    return AnswerFigures(
        problems=len(judged),
        accuracy=accuracy if judged else None,
        low=low if judged else None,
        high=high if judged else None,
        pass_at=_at_each(
            {k: [pass_at_k(each.judged, each.correct, k) for each in judged if each.judged >= k] for k in ks}, seed=seed
        ),
        majority_at=_at_each({k: _majorities(judged, k) for k in ks}, seed=rng.key(seed, "majority")),
        length_mean=float(lengths.mean()) if lengths.size else None,
        length_p95=float(np.quantile(lengths, 0.95)) if lengths.size else None,
        truncated=sum(answer.truncated for answer in answers) / samples if samples else None,
    )


def figures_by_domain(
    answers: Sequence[EvaluationDone], *, pass_at: Iterable[int], seed: int
) -> dict[str, AnswerFigures]:
    """Compute the metrics of the answers in each domain; return them by the domain's name."""
    return _of_each([(answer.domain, answer) for answer in answers], tuple(pass_at), seed)


def figures_by_tag(answers: Sequence[EvaluationDone], *, pass_at: Iterable[int], seed: int) -> dict[str, AnswerFigures]:
    """Compute the metrics of each tag, for the `MOST_TAGS` tags with the most problems; return them by tag."""
    tagged = [(tag, answer) for answer in answers for tag in sorted(set(answer.tags))]
    counts = Counter(tag for tag, _ in tagged)
    most = sorted(counts, key=lambda tag: (-counts[tag], tag))[:MOST_TAGS]
    return _of_each([(tag, answer) for tag, answer in tagged if tag in most], tuple(pass_at), seed)


def majority_right(answers: Sequence[str], right: Sequence[bool]) -> bool:
    """Return True if the most frequent answer is correct; ties go to the answer that occurs first."""
    votes = Counter(answer for answer in answers if answer)
    return bool(votes) and right[answers.index(votes.most_common(1)[0][0])]


def _of_each(
    named: Iterable[tuple[str, EvaluationDone]], pass_at: tuple[int, ...], seed: int
) -> dict[str, AnswerFigures]:
    groups: dict[str, list[EvaluationDone]] = {}
    for name, answer in named:
        groups.setdefault(name, []).append(answer)
    return {
        name: figures_of(groups[name], pass_at=pass_at, seed=rng.key(seed, "group", name)) for name in sorted(groups)
    }


def _majorities(judged: Sequence[EvaluationDone], k: int) -> list[float]:
    """Return maj@k of each problem with verdicts on k samples or more, in domains whose verifier extracts answers."""
    answering = {each.domain for each in judged if any(each.answers)}
    chances = []
    for each in judged if k >= LEAST_MAJORITY else ():
        if each.domain not in answering or each.judged < k:
            continue
        kept = [place for place in range(len(each.answers)) if place not in each.unjudged]
        answers, right = [each.answers[place] for place in kept], [each.right[place] for place in kept]
        runs = range(len(kept) - k + 1)
        chances.append(sum(majority_right(answers[at : at + k], right[at : at + k]) for at in runs) / len(runs))
    return chances


def _at_each(chances: Mapping[int, Sequence[float]], *, seed: int) -> list[PassAt]:
    estimates = {k: estimate(values, seed=rng.key(seed, k)) for k, values in chances.items() if values}
    return [
        PassAt(k=k, value=value, low=low, high=high, problems=len(chances[k]))
        for k, (value, low, high) in estimates.items()
    ]


#: Two-sided 95 % quantile of the normal distribution.
_Z: Final = 1.959964
#: Number of bootstrap resamples: enough that the ends of an interval differ between seeds by about 1 % of its width.
_RESAMPLES: Final = 2000


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the probability that at least one of k samples is correct: 1 − C(n−c, k) / C(n, k).

    Of n = `samples` samples, c = `correct` are correct. The estimate is unbiased for n ≥ k. It is computed as a
    product, which neither overflows nor loses digits (Chen et al. 2021, Eq. 1, figure 3). Raises ValueError unless
    1 ≤ k ≤ n and 0 ≤ c ≤ n.
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(f"expected 1 ≤ k ≤ n and 0 ≤ c ≤ n, got n = {samples}, c = {correct}, k = {k}")
    if samples - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - correct + 1, samples + 1))


def estimate(values: Sequence[float], *, seed: int) -> tuple[float, float, float]:
    """Return the mean of values in [0, 1], one for each problem, and the ends of its 95 % interval.

    Without values, these are 0 and (0, 1). The interval is Wilson's if every value is 0 or 1, otherwise a percentile
    bootstrap over problems (Efron 1979). If all values are equal, the bootstrap would have zero width, so Wilson's
    interval is used; it is conservative, since of all values in [0, 1] with a given mean, zeros and ones have the
    largest variance.
    """
    count = len(values)
    mean = math.fsum(values) / count if count else 0.0
    if len(set(values)) < 2 or set(values) <= {0.0, 1.0}:
        low, high = wilson_interval(mean * count, count)
    else:
        low, high = bootstrap_interval(values, seed=seed)
    return mean, low, high


def wilson_interval(successes: float, trials: int) -> tuple[float, float]:
    """Return Wilson's score interval for a proportion (Wilson 1927); (0, 1) if there are no trials."""
    if trials == 0:
        return 0.0, 1.0
    p, z = successes / trials, _Z
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap_interval(values: Sequence[float], *, seed: int) -> tuple[float, float]:
    """Return the 2.5 % and 97.5 % quantiles of the bootstrapped mean; equal seeds give equal intervals."""
    # Instead of resampling problems, draw how often each distinct value occurs: the same distribution, but faster.
    levels, counts = np.unique(np.asarray(values, np.float64), return_counts=True)
    drawn = rng.generator(seed, "bootstrap").multinomial(len(values), counts / len(values), size=_RESAMPLES)
    low, high = np.quantile(drawn @ levels / len(values), (0.025, 0.975))
    return float(low), float(high)
