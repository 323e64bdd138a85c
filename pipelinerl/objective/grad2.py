"""Term (slot) `grad2` of RLAX Eq. 3: the regularizer, independent of the advantage; a penalty is negative."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final, Protocol

import numpy as np

from pipelinerl.arrays import Array
from pipelinerl.objective.adv import COVARIANCE, covariances
from pipelinerl.objective.reward import Floats, Scored
from pipelinerl.objective.tokens import SYMBOLS, Policy, Tokens, columns_of
from trainer_contract.types import HeadMeasure


class Regularizer(Protocol):
    """A differentiable function of the current log-probs, added to the policy term; bodies are defaults."""

    @property
    def is_zero(self) -> bool:
        """True if there is no regularisation, so that tokens with advantage 0 have no gradient."""
        return False

    @property
    def needs(self) -> frozenset[str]:
        return frozenset()

    @property
    def formula(self) -> str: ...

    @property
    def measure(self) -> HeadMeasure | None:
        """The measure of each token's whole distribution that the term reads, if any; also in `needs`."""
        return None

    @property
    def chooses_by(self) -> frozenset[str]:
        """The columns of forward passes that `choices` reads on the whole batch."""
        return frozenset()

    def choices(self, scored: Scored, columns: Mapping[str, Floats]) -> dict[str, Floats]:
        """Return, by name, columns [N] that mark tokens chosen from the whole batch; {} if none are."""
        return {}

    def problems(self) -> Iterator[str]:
        yield from ()

    def doubts(self, always_current: frozenset[Policy], *, weighted: bool) -> Iterator[str]:
        """Yield a warning for each choice that probably has no effect; `always_current` are the policies that equal π_θ
        throughout a step, `weighted` is True if `is_weight` holds a ratio.
        """
        yield from ()

    def value(self, tokens: Tokens) -> Array: ...

    def pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        """Return d(Σ_t cotangent_t · value_t) / d logprobs, [T]; the cotangent is 0 outside the mask."""
        return tokens.xp.zeros_like(cotangent)

    def measure_pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        """Return d(Σ_t cotangent_t · value_t) / d m, [T], for the term's `measure` m."""
        return tokens.xp.zeros_like(cotangent)


@dataclass(frozen=True, slots=True)
class NoRegularizer(Regularizer):
    """No regularisation: the term is 0."""

    is_zero: ClassVar = True
    formula: ClassVar = "0"

    def value(self, tokens: Tokens) -> Array:
        return tokens.xp.zeros_like(tokens.current)


class Estimator(StrEnum):
    """Estimator of KL(π_θ ‖ π_ref) from one token (Schulman 2020), with d = log π_ref − log π_θ.

    For on-policy tokens, the gradient of K2 is an unbiased estimate of the KL's gradient, and the gradient of K3
    estimates the gradient of the reversed KL. The gradient of K1 is 0 in expectation, so use K1 only in rewards
    (`adv.kl`) or together with importance weights.
    """

    K1 = "k1"
    """−d."""
    K2 = "k2"
    """d²/2."""
    K3 = "k3"
    """e^d − d − 1: unbiased and never negative. GRPO, Eq. 4. RLAX prints π_θ/π_old in place of e^d = π_ref/π_θ."""
    K3_WEIGHTED = "k3_weighted"
    """(π_θ/π_over)·(e^d − d − 1), whose gradient is unbiased on tokens of π_over. DeepSeek-V3.2 (2025), Eq. 7."""


@dataclass(frozen=True, slots=True)
class KLPenalty(Regularizer):
    """−beta·KL(π_θ ‖ π_to); by default π_to is the reference. With beta = 0 no reference log-probs are needed.

    The estimator `k3_weighted` has an importance weight π_θ/π_over; `over` must be the policy that sampled the tokens.
    An optional column `kl_coefficients` [T] multiplies beta; see `kl_control.as_column`.
    """

    beta: float = 0.04
    estimator: Estimator = Estimator.K3
    to: Policy = Policy.REFERENCE
    over: Policy = Policy.BEHAVIOR

    @property
    def needs(self) -> frozenset[str]:
        if not self.beta:
            return frozenset()
        return columns_of(self.to, *([self.over] if self.estimator is Estimator.K3_WEIGHTED else []))

    @property
    def formula(self) -> str:
        text = {Estimator.K1: "(−d_t)", Estimator.K2: "d_t²/2", Estimator.K3: "(e^d_t − d_t − 1)"}
        text[Estimator.K3_WEIGHTED] = f"(π_θ/{SYMBOLS[self.over]})·{text[Estimator.K3]}"
        return f"−{self.beta:g}·{text[self.estimator]},  d_t = log({SYMBOLS[self.to]}/π_θ)" if self.beta else "0"

    def problems(self) -> Iterator[str]:
        if self.beta and self.to is Policy.CURRENT:
            yield "grad2.to must not be current: the KL of a policy from itself is 0"
        if self.beta and self.estimator is Estimator.K3_WEIGHTED and self.over is Policy.CURRENT:
            yield "grad2.over must not be current: the ratio of a policy to itself is 1; take estimator 'k3'"

    def doubts(self, always_current: frozenset[Policy], *, weighted: bool) -> Iterator[str]:
        if self.beta and self.to in always_current:
            yield f"grad2 penalises the KL to π_{self.to}, from which the step starts, and is always 0; take behavior"
        if self.beta and self.estimator is Estimator.K1 and not weighted:
            yield "grad2.estimator k1 has no gradient in expectation without importance weights; take k3, k2, or adv.kl"

    def value(self, tokens: Tokens) -> Array:
        if not self.beta:
            return tokens.xp.zeros_like(tokens.current)
        difference = tokens.log_ratio(self.to, Policy.CURRENT)
        beta = self._coefficient(tokens)
        if self.estimator is Estimator.K1:
            return beta * difference
        if self.estimator is Estimator.K2:
            return -beta * 0.5 * difference * difference
        estimate = tokens.expm1(difference) - difference
        if self.estimator is Estimator.K3_WEIGHTED:
            estimate = tokens.ratio(Policy.CURRENT, self.over) * estimate
        return -beta * estimate

    def pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        """Return the cotangent times −beta (K1), beta·d (K2), beta·(e^d − 1) (K3) or beta·(π_θ/π_over)·d (weighted)."""
        if not self.beta:
            return tokens.xp.zeros_like(cotangent)
        beta = self._coefficient(tokens)
        if self.estimator is Estimator.K1:
            return -beta * cotangent
        difference = tokens.log_ratio(self.to, Policy.CURRENT)
        slope = tokens.expm1(difference) if self.estimator is Estimator.K3 else difference
        if self.estimator is Estimator.K3_WEIGHTED:
            slope = slope * tokens.ratio(Policy.CURRENT, self.over)
        return beta * slope * cotangent

    def _coefficient(self, tokens: Tokens) -> Array | float:
        factors = tokens.columns.get("kl_coefficients")
        return self.beta if factors is None else self.beta * tokens.blanked(factors)


#: Name of the column in which `CovariancePenalty` marks the tokens to penalise.
CHOSEN: Final = "kl_coefficients"


@dataclass(frozen=True, slots=True)
class CovariancePenalty(Regularizer):
    """KL-Cov (Cui et al. 2025, arXiv 2505.22617): −beta·|log π_θ − log π_old| for tokens of high covariance.

    When a step begins, the share·N tokens (at least one) with the highest `adv.covariances` in the whole batch are
    chosen. The column `kl_coefficients` is 1 for the chosen tokens, which are penalised, and 0 for all others. The
    gradient is 0 where π_θ = π_old.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"old_logprobs", CHOSEN})
    chooses_by: ClassVar[frozenset[str]] = frozenset({"old_logprobs"})

    beta: float = 1.0
    share: float = 2e-3

    @property
    def formula(self) -> str:
        return f"−{self.beta:g}·|log(π_θ/π_old)| for the {self.share:g}·N tokens with the highest cov_t,  {COVARIANCE}"

    def doubts(self, always_current: frozenset[Policy], *, weighted: bool) -> Iterator[str]:
        if Policy.OLD in always_current:
            yield (
                "grad2 kl_cov penalises the distance to π_old, from which the step starts, and has no gradient there; "
                "raise training.epochs or training.mini_batches"
            )

    def choices(self, scored: Scored, columns: Mapping[str, Floats]) -> dict[str, Floats]:
        """Return the column `CHOSEN`: 1 for each token to penalise, else 0, [N]; tokens that are not judged have 0."""
        advantages, old_logprobs, judged = columns["advantages"], columns["old_logprobs"], scored.judged
        found = np.where(judged, covariances(advantages, old_logprobs, judged), -np.inf)
        count = min(int(judged.sum()), max(1, int(self.share * judged.sum())))
        coefficients = np.zeros(len(found))
        coefficients[np.argsort(-found, kind="stable")[:count]] = 1.0
        return {CHOSEN: coefficients}

    def value(self, tokens: Tokens) -> Array:
        distance = tokens.xp.abs(tokens.log_ratio(Policy.CURRENT, Policy.OLD))
        return -self.beta * tokens.column(CHOSEN) * distance

    def pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        side = tokens.xp.sign(tokens.log_ratio(Policy.CURRENT, Policy.OLD))
        return -self.beta * tokens.column(CHOSEN) * side * cotangent


@dataclass(frozen=True, slots=True)
class EntropyBonus(Regularizer):
    """beta·H(π_θ), estimated from the sampled tokens only: the value is −beta·(log π_θ)²/2, analogous to K2 for a KL.

    Its derivative is −beta·log π_θ, and E_{o~π_θ}[−log π_θ(o)·∇log π_θ(o)] = ∇H. The estimate is unbiased for on-policy
    tokens or with importance weights. The more obvious value −log π_θ has an expected gradient of 0.
    """

    beta: float = 0.001

    @property
    def formula(self) -> str:
        return f"−{self.beta:g}·(log π_θ(o_t))²/2"

    def value(self, tokens: Tokens) -> Array:
        logprobs = tokens.logprobs
        return -self.beta * 0.5 * logprobs * logprobs

    def pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        return -self.beta * tokens.logprobs * cotangent


class MeasureBonus(Regularizer, Protocol):
    """beta · m for a measure m of each token's whole distribution."""

    beta: float

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({self.measure} if self.measure else ())

    def value(self, tokens: Tokens) -> Array:
        return self.beta * tokens.column(str(self.measure))

    def measure_pullback(self, tokens: Tokens, cotangent: Array) -> Array:
        return self.beta * cotangent


@dataclass(frozen=True, slots=True)
class ExactEntropy(MeasureBonus):
    """beta·H(π_θ(·|s_t)) over the whole vocabulary; `EntropyBonus` estimates it from the sampled token alone."""

    measure: ClassVar = HeadMeasure.ENTROPY

    beta: float = 0.001

    @property
    def formula(self) -> str:
        return f"{self.beta:g}·H(π_θ(·|s_t))"


@dataclass(frozen=True, slots=True)
class LogBarrier(MeasureBonus):
    """beta·(1/|A|) Σ_a log π_θ(a|s_t) over the vocabulary A: the log barrier of Agarwal et al. 2021, Eq. 12 (λ = beta).

    Up to a constant it is −beta·KL(uniform ‖ π_θ(·|s_t)), a penalty that grows without bound as any vocabulary token's
    probability goes to 0. The mean over the batch's tokens replaces the paper's mean over states, 1/|S| Σ_s.
    """

    measure: ClassVar = HeadMeasure.MEAN_LOGPROB

    beta: float = 0.001

    @property
    def formula(self) -> str:
        return f"{self.beta:g}·(1/|A|)·Σ_a log π_θ(a|s_t)"


KINDS: Final[Mapping[str, type[Regularizer]]] = {
    "none": NoRegularizer,
    "kl": KLPenalty,
    "kl_cov": CovariancePenalty,
    "entropy": EntropyBonus,
    "exact_entropy": ExactEntropy,
    "log_barrier": LogBarrier,
}
