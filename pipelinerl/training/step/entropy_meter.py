"""`EntropyMeter`: the policy's exact entropy, now and then, on a few rollouts of a step, before the step is taken.

One rollout in 16 is computed once more for it, forwards and backwards with a gradient of 0 that is discarded: at the
default interval 0.6 % of the trainer's work. The step itself is the same to the bit with and without.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from pipelinerl.numerics.entropy_probe import EntropyProbe
from pipelinerl.training.rollouts.batch import TrainBatch
from pipelinerl.training.rollouts.packing import alone
from pipelinerl.types import Rollout
from trainer_contract.errors import NonFiniteError
from trainer_contract.trainer import Trainer

#: One rollout in so many is measured.
_ONE_IN: Final = 16
#: The figure.
EXACT_ENTROPY: Final = "exact_entropy"


@final
@dataclass(frozen=True, slots=True)
class EntropyMeter:
    """Measures in every step whose version `interval_steps` divides; 0 for none."""

    interval_steps: int = 0

    def measure(self, policy: Trainer, batch: TrainBatch) -> dict[str, float]:
        """The figure in nats per sampled token, at the weights that the step starts from; {} in other steps.

        Leaves no gradient behind, and must find none.
        """
        if self.interval_steps == 0 or batch.producing % self.interval_steps:
            return {}
        try:
            (measured,) = policy.backward([alone(_chosen(batch))], EntropyProbe())
        except NonFiniteError:  # the step finds the cause, and says so
            return {}
        finally:
            policy.discard_gradient()
        return {EXACT_ENTROPY: measured.loss}


def _chosen(batch: TrainBatch) -> list[Rollout]:
    """Some of those that the step computes, evenly spaced, whatever their length."""
    rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
    members = sorted(member for packed in batch.packed for member in packed.members)
    return [rollouts[member] for member in members[::_ONE_IN]]
