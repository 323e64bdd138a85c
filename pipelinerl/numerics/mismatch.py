"""Comparison of two sets of log-probs of the same tokens: trainer against sampler, or recomputed against current."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray


@final
@dataclass(frozen=True, slots=True)
class Mismatch:
    """Statistics of two sets of log-probs, `ours` and `theirs`, over tokens that were sampled from π_theirs.

    With d = log π_ours − log π_theirs and r = exp(d):

    Attributes:
        mean, p50, p95, max: of |d|, in nats (RLAX, figure 5, reports mean and P95).
        max_probability: the largest |π_ours − π_theirs| (TIS note, figure 1).
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
    """Compare the log-probs `ours` [N] with `theirs` [N]; without tokens, return the statistics of perfect agreement.

    Raises:
        ValueError: the shapes differ.
    """
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
