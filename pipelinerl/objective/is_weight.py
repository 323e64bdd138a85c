"""Term (slot) `is_weight` of RLAX Eq. 3: importance weights. No gradient flows through them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final, Protocol

from pipelinerl.arrays import Array
from pipelinerl.objective.tokens import LAG_LOSS, SYMBOLS, Policy, Tokens, columns_of


class ImportanceWeight(Protocol):
    """A rule for the importance weights of tokens; members with a body are defaults."""

    @property
    def numerator(self) -> Policy | None:
        """The policy in the numerator of the ratio; None if the weight holds no ratio."""
        return None

    @property
    def denominator(self) -> Policy | None:
        """The policy in the denominator of the ratio; None if the weight holds no ratio."""
        return None

    @property
    def lag_loss(self) -> float:
        """κ: the share of a step's learning that lag costs per unit of 1 − ESS, with a ratio to the sampling policy."""
        return LAG_LOSS

    @property
    def of_rollout(self) -> bool:
        """True if the ratio covers a whole rollout, whose segments must then be in one micro-batch."""
        return False

    @property
    def needs(self) -> frozenset[str]:
        return columns_of(*(policy for policy in (self.numerator, self.denominator) if policy))

    @property
    def formula(self) -> str: ...

    def weight(self, tokens: Tokens) -> Array: ...

    def truncated(self, tokens: Tokens) -> Array:
        """Return the mask [T] of weights that were truncated; by default none are."""
        return tokens.xp.zeros_like(tokens.inside)


@dataclass(frozen=True, slots=True)
class Unweighted(ImportanceWeight):
    """Weight 1 for every token: the data counts as on-policy, or `grad1` contains the ratio (PPO)."""

    formula: ClassVar = "1"

    def weight(self, tokens: Tokens) -> Array:
        return tokens.xp.ones_like(tokens.current)


class Outside(StrEnum):
    """Treatment of a ratio outside [low, high]."""

    TRUNCATE = "truncate"
    """Clip to the nearer bound: biased, but every token still trains (TIS)."""
    MASK = "mask"
    """Set to 0, which excludes the token (AReaL's implementation of decoupled PPO)."""


@dataclass(frozen=True, slots=True)
class TokenRatio(ImportanceWeight):
    """π_numerator / π_denominator for each token; `outside` says how a ratio outside [low, high] is treated.

    The ratio current/behavior with high = C is truncated importance sampling for REINFORCE (TIS, Yao et al. 2025);
    without a bound it is what they call vanilla importance sampling. The ratio old/behavior, combined with PPO's own
    ratio, corrects the numerical difference between trainer and sampler. The bounds 1 − ε and 1 + ε give CISPO
    (MiniMax-M1 Eq. 5).
    """

    low: float = 0.0
    high: float = math.inf
    numerator: Policy = Policy.CURRENT
    denominator: Policy = Policy.BEHAVIOR
    outside: Outside = Outside.TRUNCATE

    @property
    def formula(self) -> str:
        return _kept(f"{_fraction(self)}(o_t)", self.low, self.high, self.outside)

    def weight(self, tokens: Tokens) -> Array:
        return _keep(tokens, tokens.ratio(self.numerator, self.denominator), self.low, self.high, self.outside)

    def truncated(self, tokens: Tokens) -> Array:
        return _beyond(tokens.ratio(self.numerator, self.denominator), self.low, self.high)


class Mean(StrEnum):
    """The one ratio that stands for those of a rollout's tokens: their product, or their geometric mean."""

    PRODUCT = "product"
    """Π_t r_t: the ratio of the whole sequence's probabilities; unbiased, but its variance grows with the length."""
    GEOMETRIC = "geometric"
    """(Π_t r_t)^(1/|o_i|): the geometric mean per token (GSPO Eq. 7)."""


@dataclass(frozen=True, slots=True)
class SequenceWeight(ImportanceWeight):
    """One ratio for all tokens of a rollout, treated as in `TokenRatio`; unbounded, `Mean.PRODUCT` is RLAX's r_i(θ)."""

    of_rollout: ClassVar = True

    mean: Mean = Mean.PRODUCT
    low: float = 0.0
    high: float = math.inf
    numerator: Policy = Policy.CURRENT
    denominator: Policy = Policy.BEHAVIOR
    outside: Outside = Outside.TRUNCATE

    @property
    def formula(self) -> str:
        return _kept(_of_sequence(self, self.mean), self.low, self.high, self.outside)

    def weight(self, tokens: Tokens) -> Array:
        return _keep(tokens, _sequence_ratio(tokens, self), self.low, self.high, self.outside)

    def truncated(self, tokens: Tokens) -> Array:
        return tokens.inside & _beyond(_sequence_ratio(tokens, self), self.low, self.high)


@dataclass(frozen=True, slots=True)
class ToprWeight(ImportanceWeight):
    """TOPR (Le Roux et al. 2025, Eq. 8): the sequence's ratio, at most `negative_high`, where A < 0; 1 elsewhere.

    Rollouts with positive advantage train as in supervised learning. Rollouts with negative advantage lose their effect
    once the policy makes them unlikely.
    """

    of_rollout: ClassVar = True

    negative_high: float = 1.0
    mean: Mean = Mean.PRODUCT
    numerator: Policy = Policy.CURRENT
    denominator: Policy = Policy.BEHAVIOR

    @property
    def formula(self) -> str:
        return f"1 where A ≥ 0, else min({_of_sequence(self, self.mean)}, {self.negative_high:g})"

    def weight(self, tokens: Tokens) -> Array:
        ratio = tokens.xp.clip(_sequence_ratio(tokens, self), None, self.negative_high)
        return tokens.xp.where(tokens.advantages < 0, ratio, 1.0)

    def truncated(self, tokens: Tokens) -> Array:
        return tokens.inside & (tokens.advantages < 0) & (_sequence_ratio(tokens, self) > self.negative_high)


@dataclass(frozen=True, slots=True)
class GammaWeight(ImportanceWeight):
    """VESPO (Shen et al. 2026): the weight W^power·e^(decay·(1 − W)), where W is the sequence's ratio.

    The weight is 1 at W = 1 and goes to 0 for small and large W. The parameters depend on the advantage's sign; their
    defaults are those in the authors' `core_algos.py`.
    """

    of_rollout: ClassVar = True

    positive_power: float = 2.0
    positive_decay: float = 3.0
    negative_power: float = 3.0
    negative_decay: float = 2.0
    numerator: Policy = Policy.CURRENT
    denominator: Policy = Policy.BEHAVIOR

    @property
    def formula(self) -> str:
        up, down = f"W^{self.positive_power:g}·e^({self.positive_decay:g}·(1 − W))", f"W^{self.negative_power:g}"
        below = f"{down}·e^({self.negative_decay:g}·(1 − W))"
        return f"{up} where A ≥ 0, else {below},  W = {_of_sequence(self, Mean.PRODUCT)}"

    def weight(self, tokens: Tokens) -> Array:
        xp, is_good = tokens.xp, tokens.advantages >= 0
        log_ratio = tokens.rollout_total(tokens.log_ratio(self.numerator, self.denominator))
        log_ratio = xp.clip(log_ratio, -_FAR, _FAR)
        up = self.positive_power * log_ratio - self.positive_decay * xp.expm1(log_ratio)
        down = self.negative_power * log_ratio - self.negative_decay * xp.expm1(log_ratio)
        return xp.exp(xp.where(is_good, up, down))


KINDS: Final[Mapping[str, type[ImportanceWeight]]] = {
    "one": Unweighted,
    "token_ratio": TokenRatio,
    "sequence_ratio": SequenceWeight,
    "topr": ToprWeight,
    "gamma": GammaWeight,
}

#: Bound of a sequence's log-ratio, as in VESPO's code; beyond it the weight is 0 in floating point anyway.
_FAR: Final = 20.0


def _sequence_ratio(tokens: Tokens, kind: SequenceWeight | ToprWeight) -> Array:
    differences = tokens.log_ratio(kind.numerator, kind.denominator)
    whole = tokens.rollout_total if kind.mean is Mean.PRODUCT else tokens.rollout_mean
    return tokens.exp(whole(differences))


def _keep(tokens: Tokens, ratio: Array, low: float, high: float, outside: Outside) -> Array:
    if outside is Outside.TRUNCATE:
        return tokens.xp.clip(ratio, low, high)
    return tokens.xp.where(_beyond(ratio, low, high), 0.0, ratio)


def _beyond(ratio: Array, low: float, high: float) -> Array:
    return (ratio < low) | (ratio > high)


def _fraction(kind: TokenRatio | SequenceWeight | ToprWeight | GammaWeight) -> str:
    return f"({SYMBOLS[kind.numerator]}/{SYMBOLS[kind.denominator]})"


def _of_sequence(kind: SequenceWeight | ToprWeight | GammaWeight, mean: Mean) -> str:
    product = f"Π_t {_fraction(kind)}(o_t)"
    return product if mean is Mean.PRODUCT else f"({product})^(1/|o_i|)"


def _kept(text: str, low: float, high: float, outside: Outside) -> str:
    if low == 0.0 and high == math.inf:
        return text
    if outside is Outside.MASK:
        return f"{text} where it lies in [{low:g}, {high:g}], else 0"
    return f"min({text}, {high:g})" if low == 0.0 else f"clip({text}, {low:g}, {high:g})"
