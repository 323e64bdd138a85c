"""`ForwardPasses`: the forward passes before a step, each made only when the union of needs asks for its column.

old_logprobs   the policy, at the weights that sampled each token or at those that the step starts from; or the
               sampler's own, as the recipe chooses
ref_logprobs   the reference: a worker with the weights of the run's first day, which never steps
values         the critic, before it learns from this step

Where routing is replayed, it is in the policy's passes; reference and critic are other models, whose routers choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from pipelinerl.enums import OldLogprobs
from pipelinerl.training.publish.weight_history import WeightHistory
from pipelinerl.training.rollouts.packing import prefixes, with_columns
from trainer_contract.trainer import Trainer
from trainer_contract.types import Bool, Float32, MicroBatch

#: A column of all micro-batches of a step.
Pass = Callable[[Sequence[MicroBatch]], list[Float32]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPasses:
    """Who computes which column. A pass for which there is nobody is refused when the recipe is read.

    `history` is there where `old_logprobs` are those at the sampling weights.
    """

    policy: Trainer
    critic: Trainer | None = None
    reference: Trainer | None = None
    old_logprobs: OldLogprobs = OldLogprobs.RECOMPUTE
    history: WeightHistory | None = None

    def plan(self, needs: Iterable[str]) -> Mapping[str, Pass]:
        """The passes for `needs`, by the name of their column, in the order they are made."""
        old: dict[OldLogprobs, Pass] = {
            OldLogprobs.SAMPLING_WEIGHTS: self._at_sampling_weights,
            OldLogprobs.RECOMPUTE: self.policy.forward,
            OldLogprobs.BEHAVIOR: lambda batches: [batch.behavior_logprobs for batch in batches],
        }
        passes = {"old_logprobs": old[self.old_logprobs]}
        if self.reference is not None:
            reference = self.reference
            passes["ref_logprobs"] = lambda batches: reference.forward(unrouted(batches))
        if self.critic is not None:
            critic = self.critic
            passes["values"] = lambda batches: critic.forward(unrouted(batches))
        wanted = frozenset(needs)
        return {name: call for name, call in passes.items() if name in wanted}

    def _at_sampling_weights(self, batches: Sequence[MicroBatch]) -> list[Float32]:
        """The policy's log-probs [T] of each token in the loss mask at the weights that sampled it; 0 elsewhere.

        One version after the other, each on what it needs: of the rollouts that it sampled in, the tokens up to its
        last. A rollout that saw one version costs one pass; one that saw n costs n of rising length.
        """
        assert self.history is not None, "old_logprobs at the sampling weights need a history of them"
        columns = [np.zeros(batch.num_tokens, np.float32) for batch in batches]
        sampled = np.concatenate([_versions(batch)[batch.loss_mask] for batch in batches])
        for version in np.unique(sampled).tolist():
            tokens = [batch.loss_mask & (_versions(batch) == version) for batch in batches]
            touched = [number for number, its in enumerate(tokens) if its.any()]
            parts = [prefixes(batches[number], through=tokens[number]) for number in touched]
            found = self.policy.forward_at([part.micro_batch for part in parts], self.history.weights(version))
            for number, part, logprobs in zip(touched, parts, found, strict=True):
                its: Bool = tokens[number]
                columns[number][its] = logprobs[its[part.kept]]
        return columns


def unrouted(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """The same for another model than the one that sampled: its own routers choose."""
    return [
        batch if batch.routed_experts is None else with_columns(batch, {"routed_experts": None}) for batch in batches
    ]


def _versions(batch: MicroBatch) -> np.ndarray:
    assert batch.behavior_versions is not None, "packing gives every micro-batch its versions"
    return batch.behavior_versions
