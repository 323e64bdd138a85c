"""Estimates from a sample of problems: unbiased pass@k and 95 % confidence intervals. Pure.

Intervals describe the uncertainty from sampling problems, not answers: answers to the same problem are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from pipelinerl import rng

#: Two-sided 95 % quantile of the normal distribution.
_Z: Final = 1.959964
#: Number of bootstrap resamples: enough that the ends of an interval differ between seeds by about 1 % of its width.
_RESAMPLES: Final = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over `problems` problems and its 95 % interval; without problems, the interval is (0, 1)."""

    value: float
    low: float
    high: float
    problems: int


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Return the probability that at least one of k samples is correct: 1 − C(n−c, k) / C(n, k).

    `correct` = c of `samples` = n are correct. The estimate is unbiased for every n ≥ k. It is computed as a product,
    which neither overflows nor cancels (Chen et al. 2021, Eq. 1 and their figure 3).

    Raises:
        ValueError: k is not within 1..samples, or `correct` not within 0..samples.
    """
    if not 1 <= k <= samples or not 0 <= correct <= samples:
        raise ValueError(f"expected 1 ≤ k ≤ n and 0 ≤ c ≤ n, got n = {samples}, c = {correct}, k = {k}")
    if samples - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - correct + 1, samples + 1))


def estimate(values: Sequence[float], *, seed: int) -> Estimate:
    """Return the mean of values in [0, 1], one for each problem, with a 95 % interval.

    The interval is Wilson's if every value is 0 or 1, and otherwise a percentile bootstrap over problems (Efron 1979)
    drawn from `seed`. If all values are equal, the bootstrap has no spread and Wilson's interval is used. It is
    conservative, since no mean of values in [0, 1] varies more than a proportion does.
    """
    count = len(values)
    mean = math.fsum(values) / count if count else 0.0
    if len(set(values)) < 2 or set(values) <= {0.0, 1.0}:
        low, high = wilson_interval(mean * count, count)
    else:
        low, high = bootstrap_interval(values, seed=seed)
    return Estimate(value=mean, low=low, high=high, problems=count)


def wilson_interval(successes: float, trials: int, z: float = _Z) -> tuple[float, float]:
    """Return Wilson's score interval for a proportion (Wilson 1927); (0, 1) if there are no trials."""
    if trials == 0:
        return 0.0, 1.0
    p = successes / trials
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap_interval(values: Sequence[float], *, seed: int) -> tuple[float, float]:
    """Return the 2.5 % and 97.5 % quantiles of the bootstrapped mean; equal seeds give equal intervals.

    Each resample draws how often each distinct value occurs, instead of drawing one problem after the other. The
    distribution is the same, and it is faster because there are few distinct values.
    """
    levels, counts = np.unique(np.asarray(values, np.float64), return_counts=True)
    drawn = rng.generator(seed, "bootstrap").multinomial(len(values), counts / len(values), size=_RESAMPLES)
    low, high = np.quantile(drawn @ levels / len(values), (0.025, 0.975))
    return float(low), float(high)
