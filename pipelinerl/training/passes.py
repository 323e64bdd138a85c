"""`Passes`: the forward passes before a step, each made only when the union of needs asks for its column.

old_logprobs   the policy, at the weights that the step starts from; or the sampler's own, as the recipe chooses
ref_logprobs   the reference: a worker with the weights of the run's first day, which never steps
values         the critic, before it learns from this step
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import final

from trainer_contract.trainer import Trainer
from trainer_contract.types import Float32, MicroBatch


class OldLogprobs(StrEnum):
    """Where `old_logprobs` come from, the denominator of PPO's ratio.

    "The sampling weights" are a single policy in lockstep only: in flight, the tokens of a batch come from up to k + 1
    versions. `recompute` therefore means the weights that the step starts from: the proximal policy of decoupled PPO
    (Hilton et al. 2022; AReaL). old/behavior then carries staleness and numerics both, and current/old begins at 1.
    """

    RECOMPUTE = "recompute"
    """A forward pass of the trainer, whose graph and kernels are those of the gradient (RLAX §5.1)."""
    BEHAVIOR = "behavior"
    """What the sampler said; no pass."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """Who computes which column. A pass for which there is nobody is refused when the recipe is read."""

    policy: Trainer
    critic: Trainer | None = None
    reference: Trainer | None = None
    old_logprobs: OldLogprobs = OldLogprobs.RECOMPUTE

    def plan(self, needs: Iterable[str]) -> Mapping[str, Callable[[MicroBatch], Float32]]:
        """The passes for `needs`, by the name of their column, in the order they are made."""
        recompute = self.old_logprobs is OldLogprobs.RECOMPUTE
        passes: dict[str, Callable[[MicroBatch], Float32]] = {
            "old_logprobs": self.policy.forward if recompute else lambda batch: batch.behavior_logprobs
        }
        if self.reference is not None:
            passes["ref_logprobs"] = self.reference.forward
        if self.critic is not None:
            passes["values"] = self.critic.forward
        wanted = frozenset(needs)
        return {name: call for name, call in passes.items() if name in wanted}
