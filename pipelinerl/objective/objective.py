"""`PolicyObjective`: RLAX Eq. 3 as a value of five slots.

    J = Σ_{i,t} sg[agg · is_weight] · ( sg[adv] · grad1 + grad2 )

`agg` and `adv` are computed on the whole batch before it is packed (columns `weights` and `advantages`); the rest is
evaluated on each micro-batch. The sum runs over tokens with nothing that depends on what else shares the micro-batch,
so the gradient is invariant to packing, to the split into micro-batches, to order and to sharding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from pipelinerl.arrays import Array, largest, stop_gradient
from pipelinerl.objective.adv import Advantage
from pipelinerl.objective.agg import Aggregation
from pipelinerl.objective.grad1 import SteeredTerm
from pipelinerl.objective.grad2 import Nothing, Regularizer
from pipelinerl.objective.is_weight import ImportanceWeight
from pipelinerl.objective.tokens import Policy, Tokens
from trainer_contract.types import Columns, ObjectiveOutput


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyObjective:
    """One algorithm; satisfies `trainer_contract.types.Objective`.

    Columns [T] that `evaluate` and `logprob_gradient` read: `loss_mask`, `advantages`, `weights`, `behavior_logprobs`,
    `segment_ids`, the number `num_segments`, and whatever `needs` names. Positions outside the mask may be left out of
    all of them: the result is the same.
    """

    agg: Aggregation
    is_weight: ImportanceWeight
    adv: Advantage
    grad1: SteeredTerm
    grad2: Regularizer

    @property
    def needs(self) -> frozenset[str]:
        """The union of what the slots need: the loop runs exactly these passes."""
        return self.is_weight.needs | self.grad1.needs | self.grad2.needs

    @property
    def zero_advantage_is_idle(self) -> bool:
        """Has a token whose advantage is zero no gradient at all, so that it need not be computed?"""
        return isinstance(self.grad2, Nothing)

    def evaluate(self, logprobs: Array, columns: Columns) -> ObjectiveOutput:
        """loss = −J on this micro-batch, and what `summarize` turns into metrics.

        Args:
            logprobs: [T], current.
            columns: of the same array library.
        """
        tokens = Tokens.of(logprobs, columns)
        importance = stop_gradient(self.is_weight.weight(tokens))
        terms = tokens.advantages * self.grad1.value(tokens) + self.grad2.value(tokens)
        loss = -(tokens.weights * importance * terms).sum()
        return self._with_statistics(loss, Tokens.of(stop_gradient(logprobs), columns))

    def logprob_gradient(self, logprobs: Array, columns: Columns) -> Array:
        """d loss / d logprobs, [T], in closed form."""
        tokens = Tokens.of(logprobs, columns)
        outer = tokens.weights * self.is_weight.weight(tokens)
        steered = self.grad1.pullback(tokens, outer * tokens.advantages)
        return -(steered + self.grad2.pullback(tokens, outer))

    def _with_statistics(self, loss: Array, tokens: Tokens) -> ObjectiveOutput:
        difference = tokens.log_ratio(Policy.CURRENT, Policy.BEHAVIOR)
        ratio = tokens.xp.exp(difference) * tokens.mask
        distance = tokens.xp.abs(difference)
        sums = {
            "tokens": tokens.mask.sum(),
            "surprisal": -tokens.logprobs.sum(),
            "ratio": ratio.sum(),
            "ratio_squared": (ratio * ratio).sum(),
            "k1": -difference.sum(),
            "k3": (tokens.xp.expm1(difference) - difference).sum(),
            "abs_difference": distance.sum(),
            "clipped": (self.grad1.clipped(tokens) * tokens.mask).sum(),
            "truncated": (self.is_weight.truncated(tokens) * tokens.mask).sum(),
        }
        return ObjectiveOutput(loss, sums, {"ratio": largest(ratio), "abs_difference": largest(distance)})


def summarize(sums: Mapping[str, float], maxima: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step from the totals over its micro-batches; {} when nothing trained.

    `entropy` is the mean surprisal of the sampled tokens. `kl_k1` and `kl_k3` estimate KL(behavior ‖ current).
    `ess` is the effective sample size of the ratios current/behavior as a fraction of the tokens, 1 when on-policy.
    """
    count = sums.get("tokens", 0.0)
    if not count:
        return {}
    mean = {name: total / count for name, total in sums.items()}
    return {
        "entropy": mean["surprisal"],
        "ratio_mean": mean["ratio"],
        "ratio_max": maxima["ratio"],
        "ess": mean["ratio"] ** 2 / mean["ratio_squared"] if mean["ratio_squared"] else 0.0,
        "kl_k1": mean["k1"],
        "kl_k3": mean["k3"],
        "logprob_difference_mean": mean["abs_difference"],
        "logprob_difference_max": maxima["abs_difference"],
        "clip_fraction": mean["clipped"],
        "truncated_fraction": mean["truncated"],
    }
