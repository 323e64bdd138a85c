"""Slot `is_weight` of RLAX Eq. 3: importance weights. No gradient flows through them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol, final

from pipelinerl.arrays import Array
from pipelinerl.objective.tokens import Policy, Tokens, columns_of


class ImportanceWeight(Protocol):
    """Weights of tokens by how likely they are now against when they were sampled."""

    @property
    def needs(self) -> frozenset[str]:
        """Optional columns it reads."""
        ...

    def weight(self, tokens: Tokens) -> Array:
        """Weights [T]."""
        ...

    def truncated(self, tokens: Tokens) -> Array:
        """Bool [T]: where the weight was cut."""
        ...


@final
@dataclass(frozen=True, slots=True)
class One:
    """No weights: the data is taken as on-policy, or `grad1` carries the ratio (PPO)."""

    @property
    def needs(self) -> frozenset[str]:
        """Nothing."""
        return frozenset()

    def weight(self, tokens: Tokens) -> Array:
        """1, [T]."""
        return tokens.xp.ones_like(tokens.mask)

    def truncated(self, tokens: Tokens) -> Array:
        """Nowhere."""
        return tokens.mask < 0


@final
@dataclass(frozen=True, slots=True)
class TokenRatio:
    """clip(π_numerator / π_denominator, low, high), token by token.

    current/behavior with high = C is truncated importance sampling for REINFORCE (TIS, Yao et al. 2025); old/behavior
    with high = C corrects the sampler's numerics beside PPO's own ratio; low = 1 − ε, high = 1 + ε is CISPO (Eq. 5).
    """

    low: float = 0.0
    high: float = math.inf
    numerator: Policy = Policy.CURRENT
    denominator: Policy = Policy.BEHAVIOR

    @property
    def needs(self) -> frozenset[str]:
        """The columns of its two policies."""
        return columns_of(self.numerator, self.denominator)

    def weight(self, tokens: Tokens) -> Array:
        """Clipped ratios [T]."""
        return tokens.xp.clip(tokens.ratio(self.numerator, self.denominator), self.low, self.high)

    def truncated(self, tokens: Tokens) -> Array:
        """Where the ratio lies outside [low, high]."""
        ratio = tokens.ratio(self.numerator, self.denominator)
        return (ratio < self.low) | (ratio > self.high)


KINDS: Final[Mapping[str, type[ImportanceWeight]]] = {"one": One, "token_ratio": TokenRatio}
