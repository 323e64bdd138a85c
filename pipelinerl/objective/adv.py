"""Slot `adv` of RLAX Eq. 3: advantages, computed once on whole groups before packing.

Rollouts without a judgement take part in no baseline and have advantage 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol, final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


class Advantage(Protocol):
    """Advantages of rollouts."""

    def advantages(self, *, rewards: Floats, groups: Ints, valid: Bools) -> Floats:
        """Advantage [B] of each rollout.

        Args:
            rewards: [B]; ignored, whatever it is, where not `valid`.
            groups: [B], index of the rollout's group; any integers.
            valid: [B], False where the verdict is no judgement.
        """
        ...


class Baseline(StrEnum):
    """What is subtracted from a reward."""

    NONE = "none"
    MEAN = "mean"
    """Mean of the group, the rollout itself included."""
    LEAVE_ONE_OUT = "leave_one_out"
    """Mean of the others of the group (Kool et al. 2019); unbiased. A rollout without others has advantage 0."""


class Scale(StrEnum):
    """What the difference is divided by."""

    NONE = "none"
    STD = "std"
    """Standard deviation of the group (that of the population, divisor G) + `epsilon`. GRPO."""


@final
@dataclass(frozen=True, slots=True)
class GroupRelative:
    """(R_i − baseline) / scale, each over the group of the rollout. GRPO: mean and std; Dr. GRPO: mean alone."""

    baseline: Baseline = Baseline.MEAN
    scale: Scale = Scale.STD
    epsilon: float = 1e-6

    def advantages(self, *, rewards: Floats, groups: Ints, valid: Bools) -> Floats:
        """See `Advantage`."""
        _, index = np.unique(groups, return_inverse=True)
        known = np.where(valid, rewards, 0.0).astype(np.float64)
        count = np.bincount(index, weights=valid.astype(np.float64), minlength=1)
        mean = np.bincount(index, weights=known, minlength=1) / np.maximum(count, 1.0)
        difference = np.where(valid, known - mean[index], 0.0)
        if self.scale is Scale.STD:
            variance = np.bincount(index, weights=difference**2, minlength=1) / np.maximum(count, 1.0)
            scale = np.sqrt(variance)[index] + self.epsilon
        else:
            scale = np.ones_like(difference)
        if self.baseline is Baseline.NONE:
            difference = known
        elif self.baseline is Baseline.LEAVE_ONE_OUT:
            # R_i − (ΣR − R_i)/(n − 1) = n/(n − 1)·(R_i − mean); for n = 1 the difference is 0 already.
            difference = difference * (count / np.maximum(count - 1.0, 1.0))[index]
        return np.asarray(difference / scale)


KINDS: Final[Mapping[str, type[Advantage]]] = {"group_relative": GroupRelative}
