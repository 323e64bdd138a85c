"""Slot `grad2` of RLAX Eq. 3: the term that regularises, whatever the advantage; a penalty is negative."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol, final

from pipelinerl.arrays import Array
from pipelinerl.objective.tokens import Policy, Tokens, columns_of


class Regularizer(Protocol):
    """A differentiable function of the current log-probs."""

    @property
    def needs(self) -> frozenset[str]:
        """Optional columns it reads."""
        ...

    def value(self, tokens: Tokens) -> Array:
        """The term [T]."""
        ...

    def pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        """d(Σ_t cotangent_t · value_t) / d logprobs, [T]."""
        ...


@final
@dataclass(frozen=True, slots=True)
class Nothing:
    """No regularisation."""

    @property
    def needs(self) -> frozenset[str]:
        """Nothing."""
        return frozenset()

    def value(self, tokens: Tokens) -> Array:
        """0, [T]."""
        return tokens.xp.zeros_like(tokens.mask)

    def pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        """0, [T]."""
        return tokens.xp.zeros_like(cotangent)


class Estimator(StrEnum):
    """Of KL(π_θ ‖ π_ref) from one token (Schulman 2020), with d = log π_ref − log π_θ."""

    K2 = "k2"
    """d²/2."""
    K3 = "k3"
    """e^d − d − 1: unbiased and never negative. GRPO, Eq. 4; r is π_ref/π_θ there, not π_θ/π_old as RLAX prints."""


@final
@dataclass(frozen=True, slots=True)
class KLPenalty:
    """−beta·KL(π_θ ‖ π_ref). With beta = 0 the reference is not asked for at all."""

    beta: float = 0.04
    estimator: Estimator = Estimator.K3

    @property
    def needs(self) -> frozenset[str]:
        """`ref_logprobs`, unless beta is 0."""
        return columns_of(Policy.REFERENCE) if self.beta else frozenset()

    def value(self, tokens: Tokens) -> Array:
        """−beta·K2 or −beta·K3, [T]."""
        if not self.beta:
            return tokens.xp.zeros_like(tokens.mask)
        difference = tokens.log_ratio(Policy.REFERENCE, Policy.CURRENT)
        if self.estimator is Estimator.K2:
            return -self.beta * 0.5 * difference * difference
        return -self.beta * (tokens.xp.expm1(difference) - difference)

    def pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        """beta·d (K2) or beta·(e^d − 1) (K3), times the cotangent: d falls as log π_θ rises."""
        if not self.beta:
            return tokens.xp.zeros_like(cotangent)
        difference = tokens.log_ratio(Policy.REFERENCE, Policy.CURRENT)
        slope = difference if self.estimator is Estimator.K2 else tokens.xp.expm1(difference)
        return self.beta * slope * cotangent * tokens.mask


KINDS: Final[Mapping[str, type[Regularizer]]] = {"none": Nothing, "kl": KLPenalty}
