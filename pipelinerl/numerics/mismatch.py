"""How far apart two sets of log-probs of the same tokens are: sampler against trainer, old against recomputed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import numpy as np
from numpy.typing import NDArray


@final
@dataclass(frozen=True, slots=True)
class Mismatch:
    """Quantiles of |Δ log-prob| over tokens, in nats, and the largest difference of probabilities (TIS, figure 1)."""

    num_tokens: int
    mean: float
    p50: float
    p95: float
    max: float
    max_probability: float


def mismatch(ours: NDArray[np.floating[Any]], theirs: NDArray[np.floating[Any]]) -> Mismatch:
    """Compare log-probs [N] with log-probs [N]; of no tokens everything is 0.

    Raises:
        ValueError: the shapes differ.
    """
    if ours.shape != theirs.shape:
        raise ValueError(f"expected log-probs of the same tokens, got shapes {ours.shape} and {theirs.shape}")
    if ours.size == 0:
        return Mismatch(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    difference = np.abs(a - b)
    p50, p95 = np.quantile(difference, (0.5, 0.95))
    probability = np.abs(np.exp(a) - np.exp(b)).max()
    return Mismatch(
        ours.size, float(difference.mean()), float(p50), float(p95), float(difference.max()), float(probability)
    )
