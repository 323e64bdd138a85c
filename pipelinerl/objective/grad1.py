"""Slot `grad1` of RLAX Eq. 3: the term that the advantage steers.

A term is a value and its pullback. The pullback is written by hand, so that a backend without automatic
differentiation can train, and so that the tests have a second opinion on the automatic one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol, final

from pipelinerl.arrays import Array
from pipelinerl.objective.tokens import Policy, Tokens, columns_of


class SteeredTerm(Protocol):
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

    def clipped(self, tokens: Tokens) -> Array:
        """Bool [T]: where clipping leaves a token without gradient."""
        ...


@final
@dataclass(frozen=True, slots=True)
class LogProb:
    """log π_θ: the source of gradient of REINFORCE, CISPO and PipelineRL."""

    @property
    def needs(self) -> frozenset[str]:
        """Nothing."""
        return frozenset()

    def value(self, tokens: Tokens) -> Array:
        """log π_θ, [T]."""
        return tokens.logprobs

    def pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        """The cotangent itself, where a token trains."""
        return cotangent * tokens.mask

    def clipped(self, tokens: Tokens) -> Array:
        """Nowhere."""
        return tokens.mask < 0


@final
@dataclass(frozen=True, slots=True)
class ClippedRatio:
    """M·r with r = π_θ/π_over: PPO's clipped surrogate as a gradient mask (RLAX §6, MiniMax-M1 Eq. 7).

    M is 0 where A > 0 and r > 1 + epsilon_high, or A < 0 and r < 1 − epsilon_low: the gradient is PPO's exactly. `over`
    is the policy that the step starts from: `old` costs a forward pass, `behavior` takes the sampler's word for it.
    `inf` for an epsilon means no clipping on that side.
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    over: Policy = Policy.BEHAVIOR

    @property
    def needs(self) -> frozenset[str]:
        """The column of `over`."""
        return columns_of(self.over)

    def value(self, tokens: Tokens) -> Array:
        """M·r, [T]."""
        ratio = tokens.ratio(Policy.CURRENT, self.over)
        return tokens.xp.where(self._outside(tokens, ratio), tokens.xp.zeros_like(ratio), ratio)

    def pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        """cotangent·M·r, since dr/d log π_θ = r."""
        return cotangent * self.value(tokens) * tokens.mask

    def clipped(self, tokens: Tokens) -> Array:
        """Where M = 0."""
        return self._outside(tokens, tokens.ratio(Policy.CURRENT, self.over))

    def _outside(self, tokens: Tokens, ratio: Array) -> Array:
        above = (tokens.advantages > 0) & (ratio > 1.0 + self.epsilon_high)
        return above | ((tokens.advantages < 0) & (ratio < 1.0 - self.epsilon_low))


KINDS: Final[Mapping[str, type[SteeredTerm]]] = {"logprob": LogProb, "clipped_ratio": ClippedRatio}
