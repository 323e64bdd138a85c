"""Term (slot) `grad1` of RLAX Eq. 3: the policy term, which the advantage multiplies.

Values and pullbacks (vector-Jacobian products) are in closed form, for backends without automatic differentiation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final, Protocol

from pipelinerl.arrays import Array, stop_gradient
from pipelinerl.objective.tokens import LAG_LOSS, SYMBOLS, Policy, Tokens, columns_of


class Level(StrEnum):
    """The unit for which a policy term has one value: a token, or a whole rollout (sequence)."""

    TOKEN = "token"
    SEQUENCE = "sequence"
    """All tokens of a rollout share one value, so the aggregation must divide by the length."""


class PolicyTerm(Protocol):
    """A differentiable function of log-probs, which the advantage multiplies; bodies are defaults."""

    @property
    def over(self) -> Policy | None:
        """The policy in the denominator of the term's ratio; None if the term holds no ratio."""
        return None

    @property
    def lag_loss(self) -> float:
        """κ: the share of a step's learning that lag costs per unit of 1 − ESS, with a ratio to the sampling policy."""
        return LAG_LOSS

    @property
    def level(self) -> Level:
        """The unit for which the term has one value: a token, or a whole rollout (sequence)."""
        return Level.TOKEN

    @property
    def may_weigh_by_length(self) -> bool:
        """True if a term of whole sequences may count once for every token of its rollout, as in LUSPO."""
        return False

    @property
    def reads_whole_rollouts(self) -> bool:
        """True if a token's term depends on the rollout's other tokens."""
        return self.level is Level.SEQUENCE

    @property
    def needs(self) -> frozenset[str]:
        return columns_of(self.over) if self.over else frozenset()

    @property
    def formula(self) -> str: ...

    def problems(self) -> Iterator[str]:
        yield from ()

    def value(self, tokens: Tokens) -> Array: ...

    def pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        """Return d(Σ_t cotangent_t · value_t) / d logprobs, [T]; the cotangent is 0 outside the mask."""
        ...

    def clipped(self, tokens: Tokens) -> Array:
        """Return the mask [T] of tokens whose gradient is removed by clipping; by default none is."""
        return tokens.xp.zeros_like(tokens.inside)


class MaskedRatio(PolicyTerm, Protocol):
    """M·r: the ratio r of the current policy to `over`, of a token or a rollout, times a mask M without gradient."""

    def masked(self, tokens: Tokens) -> tuple[Array, Array]:
        """Return log r and the mask M, which is 0 where the gradient is removed and 1 elsewhere, [T] each."""
        ...

    def value(self, tokens: Tokens) -> Array:
        """Return M·r, [T]; where M is 0 the exponent is set to 0, since the gradient of 0·∞ would be NaN."""
        difference, kept = self.masked(tokens)
        return tokens.exp(tokens.xp.where(kept != 0.0, difference, 0.0)) * kept

    def pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        """Return cotangent·M·r, since dr/d log π_θ = r; for a rollout's ratio s, ds/d log π_θ(o_t) = s/|o_i|."""
        slope = cotangent * self.value(tokens)
        return slope if self.level is Level.TOKEN else tokens.blanked(tokens.rollout_mean(slope))

    def clipped(self, tokens: Tokens) -> Array:
        return self.masked(tokens)[1] == 0.0


@dataclass(frozen=True, slots=True)
class LogProb(PolicyTerm):
    """log π_θ: the policy term of REINFORCE, CISPO and PipelineRL."""

    formula: ClassVar = "log π_θ(o_t)"

    def value(self, tokens: Tokens) -> Array:
        return tokens.logprobs

    def pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        return cotangent


@dataclass(frozen=True, slots=True)
class ClippedRatio(MaskedRatio):
    """M·r with r = π_θ/π_over, PPO's clipping written as a gradient mask M (RLAX §4.2, Eq. 7; MiniMax-M1 Eq. 7).

    M is 0 if A > 0 and r > 1 + epsilon_high, or if A < 0 and r < 1 − epsilon_low; else 1. The gradient is exactly that
    of PPO's min (Schulman et al. 2017, Eq. 7). `over` is the policy in the denominator: `old` costs a forward pass,
    `behavior` uses the sampler's log-probs. An infinite `epsilon_low` or `epsilon_high` disables clipping on that side.

    If `max_drift` is finite, M is also 0 for rollouts with A < 0 whose mean log(π_over/π_θ) exceeds `max_drift`. This
    is the off-policy sequence mask of DeepSeek-V3.2 (2025, §3.1).
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    over: Policy = Policy.BEHAVIOR
    max_drift: float = math.inf

    @property
    def formula(self) -> str:
        mask = _mask("r_t", self.epsilon_low, self.epsilon_high)
        if self.max_drift < math.inf:
            mask += f",  or A < 0 and mean_t log({SYMBOLS[self.over]}/π_θ) > {self.max_drift:g}"
        return f"M_t·r_t,  r_t = π_θ/{SYMBOLS[self.over]},  {mask}"

    @property
    def reads_whole_rollouts(self) -> bool:
        return self.max_drift < math.inf

    def masked(self, tokens: Tokens) -> tuple[Array, Array]:
        difference = tokens.log_ratio(Policy.CURRENT, self.over)
        kept = _kept(tokens, difference, *_logs(self.epsilon_low, self.epsilon_high))
        if self.max_drift < math.inf:
            drift = -tokens.rollout_mean(stop_gradient(difference))
            kept = tokens.xp.where((drift > self.max_drift) & (tokens.advantages < 0), 0.0, kept)
        return difference, kept


@dataclass(frozen=True, slots=True)
class DualClippedRatio(MaskedRatio):
    """Dual-clip PPO (Ye et al. 2020, Eq. 5): PPO's mask, and also 0 where A < 0 and r > `ceiling`.

    PPO alone does not bound the ratio of tokens with negative advantage. verl clips so by default, at 3.
    """

    epsilon_low: float = 0.2
    epsilon_high: float = 0.2
    ceiling: float = 3.0
    over: Policy = Policy.BEHAVIOR

    @property
    def formula(self) -> str:
        mask = _mask("r_t", self.epsilon_low, self.epsilon_high)
        return f"M_t·r_t,  r_t = π_θ/{SYMBOLS[self.over]},  {mask} or A < 0 and r_t > {self.ceiling:g}"

    def problems(self) -> Iterator[str]:
        if self.ceiling <= 1.0:
            yield f"grad1.ceiling must be above 1, got {self.ceiling}: it bounds the ratio where A < 0"

    def masked(self, tokens: Tokens) -> tuple[Array, Array]:
        difference = tokens.log_ratio(Policy.CURRENT, self.over)
        kept = _kept(tokens, difference, *_logs(self.epsilon_low, self.epsilon_high))
        above = stop_gradient(difference) > math.log(self.ceiling)
        return difference, tokens.xp.where(above & (tokens.advantages < 0), 0.0, kept)


@dataclass(frozen=True, slots=True)
class DivergenceRatio(MaskedRatio):
    """DPPO-TV (Qi et al. 2026): M·r as in PPO, but M bounds the change of a token's probability, not the ratio r.

    M is 0 where A > 0 and π_θ − π_over > delta_high, or A < 0 and π_over − π_θ > delta_low. |π_θ − π_over| is the total
    variation distance between the two policies if all other tokens are merged into one outcome.
    """

    delta_low: float = 0.15
    delta_high: float = 0.15
    over: Policy = Policy.BEHAVIOR

    @property
    def formula(self) -> str:
        change = f"π_θ − {SYMBOLS[self.over]}"
        mask = f"M = 0 where A > 0 and {change} > {self.delta_high:g} or A < 0 and {change} < −{self.delta_low:g}"
        return f"M_t·r_t,  r_t = π_θ/{SYMBOLS[self.over]},  {mask}"

    def masked(self, tokens: Tokens) -> tuple[Array, Array]:
        change = tokens.probability(Policy.CURRENT) - tokens.probability(self.over)
        return tokens.log_ratio(Policy.CURRENT, self.over), _kept(tokens, change, -self.delta_low, self.delta_high)


@dataclass(frozen=True, slots=True)
class QuadraticRatio(PolicyTerm):
    """CFPO (Çağatan et al. 2026, Eq. 7): r − sgn(A)·(r − 1)²/(2·epsilon), a quadratic penalty instead of a clip.

    The derivative with respect to r is 1 − sgn(A)·(r − 1)/epsilon. It is 0 at PPO's clipping bound on the side to which
    the advantage pushes r, and changes sign beyond that bound.
    """

    epsilon: float = 0.2
    over: Policy = Policy.BEHAVIOR

    @property
    def formula(self) -> str:
        return f"r_t − sgn(A)·(r_t − 1)²/(2·{self.epsilon:g}),  r_t = π_θ/{SYMBOLS[self.over]}"

    def problems(self) -> Iterator[str]:
        if self.epsilon == 0:
            yield "grad1.epsilon must be positive, got 0: it divides the penalty"

    def value(self, tokens: Tokens) -> Array:
        """Return the penalised ratio, [T]; an overflowing ratio makes it infinite, not NaN."""
        ratio, sign = self._ratio(tokens)
        return ratio * (1.0 + sign * (1.0 - 0.5 * ratio) / self.epsilon) - 0.5 * sign / self.epsilon

    def pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        ratio, sign = self._ratio(tokens)
        return cotangent * ratio * (1.0 - sign * (ratio - 1.0) / self.epsilon)

    def _ratio(self, tokens: Tokens) -> tuple[Array, Array]:
        return tokens.ratio(Policy.CURRENT, self.over), tokens.xp.sign(tokens.advantages)


@dataclass(frozen=True, slots=True)
class SoftGate(PolicyTerm):
    """SAPO (Gao et al. 2025): (4/τ)·σ(τ·(r − 1)), a ratio whose gradient fades out on both sides of r = 1.

    τ is `positive` where A > 0 and `negative` elsewhere. At r = 1 the derivative in r is 1, as for the plain ratio.
    """

    positive: float = 1.0
    negative: float = 1.05
    over: Policy = Policy.BEHAVIOR

    @property
    def formula(self) -> str:
        gate = f"τ = {self.positive:g} where A > 0, else {self.negative:g}"
        return f"(4/τ)·σ(τ·(r_t − 1)),  r_t = π_θ/{SYMBOLS[self.over]},  {gate}"

    def problems(self) -> Iterator[str]:
        if not (self.positive and self.negative):
            yield "grad1.positive and grad1.negative must be positive: they divide the gate"

    def value(self, tokens: Tokens) -> Array:
        _, tau, gate = self._gate(tokens)
        return 4.0 * gate / tau

    def pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        ratio, _, gate = self._gate(tokens)
        return cotangent * 4.0 * gate * (1.0 - gate) * ratio

    def _gate(self, tokens: Tokens) -> tuple[Array, Array, Array]:
        """Return r, τ and σ(τ·(r − 1)); log r is clipped at `_FLAT`, where the sigmoid has long been constant."""
        xp = tokens.xp
        ratio = tokens.exp(xp.clip(tokens.log_ratio(Policy.CURRENT, self.over), None, _FLAT))
        tau = xp.where(tokens.advantages > 0, self.positive, xp.full_like(ratio, self.negative))
        return ratio, tau, 0.5 + 0.5 * xp.tanh(0.5 * tau * (ratio - 1.0))


@dataclass(frozen=True, slots=True)
class SequenceRatio(MaskedRatio):
    """GSPO (Zheng et al. 2025, Eq. 5): M·s with s = (Π_t π_θ/π_over)^(1/|o_i|), one ratio for the whole rollout.

    The gradient flows through s into every token of the rollout: ds/d log π_θ(o_t) = s/|o_i|. M is PPO's mask for s.
    """

    level: ClassVar = Level.SEQUENCE
    may_weigh_by_length: ClassVar = True

    epsilon_low: float = 3e-4
    epsilon_high: float = 4e-4
    over: Policy = Policy.BEHAVIOR

    @property
    def formula(self) -> str:
        ratio = f"(Π_t π_θ/{SYMBOLS[self.over]})^(1/|o_i|)"
        return f"M_i·s_i,  s_i = {ratio},  {_mask('s_i', self.epsilon_low, self.epsilon_high)}"

    def masked(self, tokens: Tokens) -> tuple[Array, Array]:
        mean = tokens.rollout_mean(tokens.log_ratio(Policy.CURRENT, self.over))
        return mean, _kept(tokens, mean, *_logs(self.epsilon_low, self.epsilon_high))


@dataclass(frozen=True, slots=True)
class GeometricRatio(PolicyTerm):
    """GMPO (Zhao et al. 2025, Algorithm 1): the rollout's geometric mean of token ratios, each clipped separately.

    The value is (Π_t ρ_t)^(1/|o_i|). log ρ_t is log r_t, clipped to at most epsilon_high where A > 0 and to at least
    −epsilon_low where A < 0 (bounds of log r, not of r). A token's gradient is value/|o_i|, or 0 if it is clipped.
    """

    level: ClassVar = Level.SEQUENCE

    epsilon_low: float = 0.4
    epsilon_high: float = 0.4
    over: Policy = Policy.BEHAVIOR

    @property
    def formula(self) -> str:
        low, high = f"−{self.epsilon_low:g}", f"{self.epsilon_high:g}"
        clipped = f"log r_t ≤ {high} where A > 0, ≥ {low} where A < 0"
        return f"(Π_t ρ_t)^(1/|o_i|),  ρ_t = r_t = π_θ/{SYMBOLS[self.over]} clipped to {clipped}"

    def value(self, tokens: Tokens) -> Array:
        difference = tokens.log_ratio(Policy.CURRENT, self.over)
        bounded = tokens.xp.clip(stop_gradient(difference), -self.epsilon_low, self.epsilon_high)
        kept = self._kept(tokens, difference)
        return tokens.exp(tokens.rollout_mean(tokens.xp.where(kept != 0.0, difference, bounded)))

    def pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        """Return Σ_{t' in i} cotangent_t'·value_i / |o_i| for every unclipped sampled token of the rollout."""
        kept = self._kept(tokens, tokens.log_ratio(Policy.CURRENT, self.over))
        return tokens.blanked(tokens.rollout_mean(cotangent * self.value(tokens)) * kept)

    def clipped(self, tokens: Tokens) -> Array:
        return self._kept(tokens, tokens.log_ratio(Policy.CURRENT, self.over)) == 0.0

    def _kept(self, tokens: Tokens, difference: Array) -> Array:
        return _kept(tokens, difference, -self.epsilon_low, self.epsilon_high)


KINDS: Final[Mapping[str, type[PolicyTerm]]] = {
    "logprob": LogProb,
    "clipped_ratio": ClippedRatio,
    "dual_clipped_ratio": DualClippedRatio,
    "divergence_ratio": DivergenceRatio,
    "quadratic_ratio": QuadraticRatio,
    "soft_gate": SoftGate,
    "sequence_ratio": SequenceRatio,
    "geometric_ratio": GeometricRatio,
}


#: Upper bound of log r in SAPO's gate. Beyond this bound the gate's derivative is 0 for any temperature τ above 1e-6.
_FLAT: Final = 20.0

#: Bound of |log-ratio| that keeps differences finite; it is larger than any finite clip range.
_FAR: Final = 1e4


def _kept(tokens: Tokens, difference: Array, low: float, high: float) -> Array:
    """Return the mask M [T], without gradient: 0 where PPO's min selects clip(r)·A < r·A. `difference` is log r, which
    cannot overflow, or a change of probability; M is float, as booleans are many times slower on CPUs.
    """
    xp = tokens.xp
    fixed = xp.clip(stop_gradient(difference), -_FAR, _FAR)
    excess = (fixed - xp.clip(fixed, low, high)) * tokens.advantages
    return 1.0 - xp.clip(xp.sign(excess), 0.0, 1.0)


def _logs(epsilon_low: float, epsilon_high: float) -> tuple[float, float]:
    return (math.log1p(-epsilon_low) if epsilon_low < 1.0 else -math.inf), math.log1p(epsilon_high)


def _mask(ratio: str, low: float, high: float) -> str:
    sides = []
    if high != math.inf:
        sides.append(f"A > 0 and {ratio} > {1 + high:g}")
    if low != math.inf:
        sides.append(f"A < 0 and {ratio} < {1 - low:g}")
    return f"M = 0 where {' or '.join(sides)}" if sides else "M = 1"
