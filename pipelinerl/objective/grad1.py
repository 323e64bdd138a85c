"""Slot `grad1` of RLAX Eq. 3: the term that the advantage steers.

A term is a value and its pullback. The pullback is written by hand, so that a backend without automatic
differentiation can train, and so that the tests have a second opinion on the automatic one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol, final

from pipelinerl.arrays import Array, stop_gradient
from pipelinerl.objective.tokens import SYMBOLS, Policy, Tokens, columns_of


class Level(StrEnum):
    """The unit that has a value of its own."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    """Every token of a rollout has the rollout's one value: the aggregation has to divide by the length."""


class PolicyTerm(Protocol):
    """A differentiable function of the current log-probs."""

    @property
    def needs(self) -> frozenset[str]:
        """Optional columns it reads."""
        ...

    @property
    def formula(self) -> str:
        """GradTerm1_{i,t} as text."""
        ...

    @property
    def level(self) -> Level:
        """The unit, a token or a rollout, that has a value of its own."""
        ...

    def value(self, tokens: Tokens) -> Array:
        """The term [T]."""
        ...

    def pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        """d(Σ_t cotangent_t · value_t) / d logprobs, [T]; the cotangent is 0 outside the mask."""
        ...

    def clipped(self, tokens: Tokens) -> Array:
        """Return the mask [T] of tokens that clipping leaves without gradient."""
        ...


@final
@dataclass(frozen=True, slots=True)
class LogProb:
    """log π_θ: the source of gradient of REINFORCE, CISPO and PipelineRL."""

    @property
    def needs(self) -> frozenset[str]:
        """Empty: it reads no optional column."""
        return frozenset()

    @property
    def formula(self) -> str:
        """GradTerm1_{i,t} as text."""
        return "log π_θ(o_t)"

    @property
    def level(self) -> Level:
        """The ratio is that of a token."""
        return Level.TOKEN

    def value(self, tokens: Tokens) -> Array:
        """log π_θ, [T]."""
        return tokens.logprobs

    def pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        """The cotangent itself."""
        return cotangent

    def clipped(self, tokens: Tokens) -> Array:
        """Return False everywhere."""
        return ~tokens.inside & tokens.inside


@final
@dataclass(frozen=True, slots=True)
class ClippedRatio:
    """M·r with r = π_θ/π_over: PPO's clipped surrogate as a gradient mask (RLAX §4.2, Eq. 7; MiniMax-M1 Eq. 7).

    M is 0 where clip(r, 1 − epsilon_low, 1 + epsilon_high)·A < r·A, that is, where A > 0 and r > 1 + epsilon_high, or
    A < 0 and r < 1 − epsilon_low: the gradient is that of PPO's min (Schulman et al. 2017, Eq. 7) exactly. `over` is
    the policy that the step starts from: `old` costs a forward pass, `behavior` takes the sampler's word for it. `inf`
    for an epsilon means no clipping on that side.
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    over: Policy = Policy.BEHAVIOR

    @property
    def needs(self) -> frozenset[str]:
        """The column of `over`."""
        return columns_of(self.over)

    @property
    def formula(self) -> str:
        """GradTerm1_{i,t} as text."""
        return f"M_t·r_t,  r_t = π_θ/{SYMBOLS[self.over]},  {_mask('r_t', self.epsilon_low, self.epsilon_high)}"

    @property
    def level(self) -> Level:
        """The ratio is that of a token."""
        return Level.TOKEN

    def value(self, tokens: Tokens) -> Array:
        """M·r, [T]."""
        return _masked_exp(tokens, *self._masked(tokens))

    def pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        """cotangent·M·r, since dr/d log π_θ = r."""
        return cotangent * self.value(tokens)

    def clipped(self, tokens: Tokens) -> Array:
        """Return the mask [T] where M = 0."""
        return self._masked(tokens)[1] == 0.0

    def _masked(self, tokens: Tokens) -> tuple[Array, Array]:
        """log r and M."""
        difference = tokens.log_ratio(Policy.CURRENT, self.over)
        return difference, _kept(tokens, difference, *_logs(self.epsilon_low, self.epsilon_high))


@final
@dataclass(frozen=True, slots=True)
class SequenceRatio:
    """GSPO (Zheng et al. 2025, Eq. 5): M·s with s = (Π_t π_θ/π_over)^(1/|o_i|), one ratio for the whole rollout.

    Its gradient flows through s into every token of the rollout: ds/d log π_θ(o_t) = s/|o_i|. M as PPO's.
    """

    epsilon_low: float = 3e-4
    epsilon_high: float = 4e-4
    over: Policy = Policy.BEHAVIOR

    @property
    def needs(self) -> frozenset[str]:
        """The column of `over`."""
        return columns_of(self.over)

    @property
    def formula(self) -> str:
        """GradTerm1_{i,t} as text."""
        ratio = f"(Π_t π_θ/{SYMBOLS[self.over]})^(1/|o_i|)"
        return f"M_i·s_i,  s_i = {ratio},  {_mask('s_i', self.epsilon_low, self.epsilon_high)}"

    @property
    def level(self) -> Level:
        """The ratio is that of a rollout."""
        return Level.SEQUENCE

    def value(self, tokens: Tokens) -> Array:
        """M·s, [T]."""
        return _masked_exp(tokens, *self._masked(tokens))

    def pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        """Σ_{t' in i} cotangent_t'·M_t'·s_i / |o_i|, to every sampled token of the rollout."""
        return tokens.blanked(tokens.rollout_mean(cotangent * self.value(tokens)))

    def clipped(self, tokens: Tokens) -> Array:
        """Return the mask [T] where M = 0."""
        return self._masked(tokens)[1] == 0.0

    def _masked(self, tokens: Tokens) -> tuple[Array, Array]:
        """log s and M."""
        mean = tokens.rollout_mean(tokens.log_ratio(Policy.CURRENT, self.over))
        return mean, _kept(tokens, mean, *_logs(self.epsilon_low, self.epsilon_high))


@final
@dataclass(frozen=True, slots=True)
class GeometricRatio:
    """GMPO (Zhao et al. 2025, Algorithm 1): the geometric mean over the rollout of token ratios, each clipped alone.

    (Π_t ρ_t)^(1/|o_i|), where log ρ_t is log r_t, but at most epsilon_high where A > 0 and at least −epsilon_low where
    A < 0; a token that is clipped has no gradient, the others (value)/|o_i| each. The epsilons bound log r, not r.
    """

    epsilon_low: float = 0.4
    epsilon_high: float = 0.4
    over: Policy = Policy.BEHAVIOR

    @property
    def needs(self) -> frozenset[str]:
        """The column of `over`."""
        return columns_of(self.over)

    @property
    def formula(self) -> str:
        """GradTerm1_{i,t} as text."""
        low, high = f"−{self.epsilon_low:g}", f"{self.epsilon_high:g}"
        clipped = f"log r_t ≤ {high} where A > 0, ≥ {low} where A < 0"
        return f"(Π_t ρ_t)^(1/|o_i|),  ρ_t = r_t = π_θ/{SYMBOLS[self.over]} clipped to {clipped}"

    @property
    def level(self) -> Level:
        """The ratio is that of a rollout."""
        return Level.SEQUENCE

    def value(self, tokens: Tokens) -> Array:
        """The geometric mean, [T]."""
        difference = tokens.log_ratio(Policy.CURRENT, self.over)
        bounded = tokens.xp.clip(stop_gradient(difference), -self.epsilon_low, self.epsilon_high)
        kept = self._kept(tokens, difference)
        return tokens.exp(tokens.rollout_mean(tokens.xp.where(kept != 0.0, difference, bounded)))

    def pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        """Σ_{t' in i} cotangent_t'·value_i / |o_i|, to every sampled token of the rollout that is not clipped."""
        kept = self._kept(tokens, tokens.log_ratio(Policy.CURRENT, self.over))
        return tokens.blanked(tokens.rollout_mean(cotangent * self.value(tokens)) * kept)

    def clipped(self, tokens: Tokens) -> Array:
        """Return the mask [T] of tokens whose own ratio is clipped."""
        return self._kept(tokens, tokens.log_ratio(Policy.CURRENT, self.over)) == 0.0

    def _kept(self, tokens: Tokens, difference: Array) -> Array:
        return _kept(tokens, difference, -self.epsilon_low, self.epsilon_high)


KINDS: Final[Mapping[str, type[PolicyTerm]]] = {
    "logprob": LogProb,
    "clipped_ratio": ClippedRatio,
    "sequence_ratio": SequenceRatio,
    "geometric_ratio": GeometricRatio,
}


#: Log-ratios beyond it are clipped by any bound that clips at all; it keeps their excess finite.
_FAR: Final = 1e4


def _kept(tokens: Tokens, difference: Array, low: float, high: float) -> Array:
    """M [T]: 0 where clip(r)·A < r·A, so that PPO's min takes the clipped side, else 1. No gradient.

    Of log-ratios and the logs of the bounds, since ratios overflow. In numbers instead of truth values, which CPUs
    handle at a fraction of the speed.
    """
    xp = tokens.xp
    fixed = xp.clip(stop_gradient(difference), -_FAR, _FAR)
    excess = (fixed - xp.clip(fixed, low, high)) * tokens.advantages
    return 1.0 - xp.clip(xp.sign(excess), 0.0, 1.0)


def _masked_exp(tokens: Tokens, difference: Array, kept: Array) -> Array:
    """M·e^difference, [T]. Where M is 0 nothing is exponentiated: the gradient of 0·∞ would be NaN."""
    return tokens.exp(tokens.xp.where(kept != 0.0, difference, 0.0)) * kept


def _logs(epsilon_low: float, epsilon_high: float) -> tuple[float, float]:
    """log(1 − epsilon_low) and log(1 + epsilon_high)."""
    return (math.log1p(-epsilon_low) if epsilon_low < 1.0 else -math.inf), math.log1p(epsilon_high)


def _mask(ratio: str, low: float, high: float) -> str:
    sides = []
    if high != math.inf:
        sides.append(f"A > 0 and {ratio} > {1 + high:g}")
    if low != math.inf:
        sides.append(f"A < 0 and {ratio} < {1 - low:g}")
    return f"M = 0 where {' or '.join(sides)}" if sides else "M = 1"
