"""`PolicyObjective`: an objective of the form of RLAX Eq. 3, composed of five exchangeable terms (slots).

    J = Σ_{i,t} sg[agg · is_weight] · ( sg[adv] · grad1 + grad2 )

The sum is over the tokens t of all rollouts i; sg means stop-gradient. `agg` and `adv` are computed on the whole batch
(columns `weights` and `advantages`), the other slots on each micro-batch. A term depends on one token or on one whole
rollout; in the second case, micro-batches never split a rollout. The gradient therefore does not depend on packing,
micro-batches, order or sharding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipelinerl.arrays import Array, stop_gradient
from pipelinerl.enums import OldLogprobs
from pipelinerl.objective.adv import Advantage
from pipelinerl.objective.agg import Aggregation
from pipelinerl.objective.grad1 import PolicyTerm
from pipelinerl.objective.grad2 import CHOSEN, Regularizer
from pipelinerl.objective.is_weight import ImportanceWeight
from pipelinerl.objective.tokens import Policy, Tokens
from trainer_contract.types import Columns, HeadMeasure


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """One algorithm; satisfies `trainer_contract.types.Objective`.

    `evaluate` and `prediction_gradient` read the columns [T] `loss_mask`, `advantages`, `weights`, `behavior_logprobs`,
    `segment_ids`, those of `needs`, and the number `num_segments`. Outside the mask, columns may hold any value, even
    NaN. The term of a token is 0 if its weight or advantage is 0 or the token is clipped, even if its ratio overflows.
    Any other overflow makes the loss infinite, and the step is skipped.
    """

    agg: Aggregation
    is_weight: ImportanceWeight
    adv: Advantage
    grad1: PolicyTerm
    grad2: Regularizer

    @property
    def needs(self) -> frozenset[str]:
        return self.is_weight.needs | self.grad1.needs | self.grad2.needs

    @property
    def passes(self) -> frozenset[str]:
        """The optional columns that forward passes must compute before a step, for the loss or for the advantages."""
        return (self.needs | self.adv.needs) - frozenset(HeadMeasure) - {CHOSEN}

    @property
    def late_columns(self) -> frozenset[str]:
        """The columns from forward passes that the whole-batch computations (advantages, `choices`) read."""
        return self.adv.needs | self.grad2.chooses_by

    @property
    def zero_advantage_is_idle(self) -> bool:
        """True if a token with advantage 0 has no gradient, so that its forward and backward can be skipped."""
        return self.grad2.is_zero

    @property
    def reads_whole_rollouts(self) -> bool:
        """True if a term depends on a whole rollout; all segments of a rollout must then be in one micro-batch."""
        return self.grad1.reads_whole_rollouts or self.is_weight.of_rollout

    def lag_loss(self, old: OldLogprobs) -> float | None:
        """Return κ, how much longer a run learns per 1 / ESS − 1 that lag causes; None if nothing corrects for lag, by
        a ratio to the behavior policy, or to `old` unless that is recomputed.
        """
        samplers = (Policy.BEHAVIOR,) if old is OldLogprobs.RECOMPUTE else (Policy.BEHAVIOR, Policy.OLD)
        terms = ((self.is_weight, self.is_weight.denominator), (self.grad1, self.grad1.over))
        return max((term.lag_loss for term, policy in terms if policy in samplers), default=None)

    def evaluate(self, logprobs: Array, columns: Columns) -> Array:
        """Return the scalar loss −J of this micro-batch; log-probs [T] and columns must be of one array library."""
        tokens = Tokens.of(logprobs, columns)
        outer = self._outer(tokens)
        steer, term = self._steered(tokens, outer)
        steered = (steer * term).sum()
        if self.zero_advantage_is_idle:
            return -steered
        return -(steered + (outer * self.grad2.value(tokens.counting(outer))).sum())

    def prediction_gradient(self, logprobs: Array, columns: Columns) -> Array:
        tokens = Tokens.of(logprobs, columns)
        outer = self._outer(tokens)
        steer, _ = self._steered(tokens, outer)
        steered = self.grad1.pullback(tokens.counting(steer), steer)
        if self.zero_advantage_is_idle:
            return -steered
        return -(steered + self.grad2.pullback(tokens.counting(outer), outer))

    def measure_gradients(self, logprobs: Array, columns: Columns) -> Mapping[HeadMeasure, Array]:
        """Return d loss / d measure, [T], in closed form, for the measure that `grad2` reads, if any."""
        if self.grad2.measure is None:
            return {}
        tokens = Tokens.of(logprobs, columns)
        return {self.grad2.measure: -self.grad2.measure_pullback(tokens, self._outer(tokens))}

    def _steered(self, tokens: Tokens, outer: Array) -> tuple[Array, Array]:
        """Return agg · is_weight · adv (0 where this is infinite and grad1 is 0) and the value of grad1, [T] each."""
        if self.is_weight.numerator is None:
            steer = outer * tokens.advantages
            return steer, self.grad1.value(tokens.counting(steer))
        xp, advantages = tokens.xp, tokens.advantages
        steer = xp.where(advantages == 0, 0.0, outer) * advantages
        term = self.grad1.value(tokens.counting(steer))
        return xp.where(xp.isinf(steer) & (term == 0), 0.0, steer), term

    def _outer(self, tokens: Tokens) -> Array:
        if self.is_weight.numerator is None:
            return tokens.weights
        return tokens.weights * stop_gradient(self.is_weight.weight(tokens))
