"""`PolicyObjective`: RLAX Eq. 3 as a value of five slots.

    J = Σ_{i,t} sg[agg · is_weight] · ( sg[adv] · grad1 + grad2 )

`agg` and `adv` are computed on the whole batch (columns `weights` and `advantages`); the rest is evaluated on each
micro-batch. The sum runs over tokens, or over whole rollouts, which no micro-batch splits, with nothing that depends on
what else shares the micro-batch, so the gradient is invariant to packing, to the
split into micro-batches, to order and to sharding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from pipelinerl.arrays import Array, stop_gradient
from pipelinerl.objective.adv import Advantage
from pipelinerl.objective.agg import Aggregation
from pipelinerl.objective.grad1 import PolicyTerm
from pipelinerl.objective.grad2 import NoRegularizer, Regularizer
from pipelinerl.objective.is_weight import ImportanceWeight, Unweighted
from pipelinerl.objective.tokens import Tokens
from trainer_contract.types import Columns


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """One algorithm; satisfies `trainer_contract.types.Objective`.

    Columns [T] that `evaluate` and `prediction_gradient` read: `loss_mask`, `advantages`, `weights`,
    `behavior_logprobs`, `segment_ids`, the number `num_segments`, and whatever `needs` names. Positions outside the
    mask may be left out of all of them: the result is the same.
    """

    agg: Aggregation
    is_weight: ImportanceWeight
    adv: Advantage
    grad1: PolicyTerm
    grad2: Regularizer

    @property
    def needs(self) -> frozenset[str]:
        """The optional columns that `evaluate` reads."""
        return self.is_weight.needs | self.grad1.needs | self.grad2.needs

    @property
    def passes(self) -> frozenset[str]:
        """The optional columns that a step must have computed: `needs`, and those of the advantages."""
        return self.needs | self.adv.needs

    @property
    def zero_advantage_is_idle(self) -> bool:
        """Has a token whose advantage is zero no gradient at all, so that it need not be computed?"""
        return self._is_free

    def evaluate(self, logprobs: Array, columns: Columns) -> Array:
        """loss = −J on this micro-batch, a scalar.

        Args:
            logprobs: [T], current.
            columns: of the same array library.
        """
        tokens = Tokens.of(logprobs, columns)
        outer = self._outer(tokens)
        steered = ((outer * tokens.advantages) * self.grad1.value(tokens)).sum()
        return -steered if self._is_free else -(steered + (outer * self.grad2.value(tokens)).sum())

    def prediction_gradient(self, logprobs: Array, columns: Columns) -> Array:
        """d loss / d logprobs, [T], in closed form."""
        tokens = Tokens.of(logprobs, columns)
        outer = self._outer(tokens)
        steered = self.grad1.pullback(tokens, outer * tokens.advantages)
        return -steered if self._is_free else -(steered + self.grad2.pullback(tokens, outer))

    @property
    def _is_free(self) -> bool:
        """Is there no regularisation, so that nothing need be computed for it?"""
        return isinstance(self.grad2, NoRegularizer)

    def _outer(self, tokens: Tokens) -> Array:
        """sg[agg · is_weight], [T]."""
        if isinstance(self.is_weight, Unweighted):
            return tokens.weights
        return tokens.weights * stop_gradient(self.is_weight.weight(tokens))
