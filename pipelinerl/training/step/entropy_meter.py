"""Measurement of the policy's exact entropy on a few rollouts of some steps, before the step is taken.

One rollout in 16 is computed once more, forward and backward, and its gradient of 0 is discarded: at the default
interval 0.6 % of the trainer's work. The step is the same to the bit with and without it. Up to half of these rollouts
are answers that the sample log keeps, so their tokens' entropies cost nothing more; the others are evenly spaced. The
kept groups are drawn by seed, so the mean stays a mean over the step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from typing import Final, final

import numpy as np

from pipelinerl.numerics.entropy_probe import EntropyProbe
from pipelinerl.training.rollouts.batch import TrainBatch
from pipelinerl.training.rollouts.packing import SegmentTable, alone
from pipelinerl.types import Rollout
from trainer_contract.errors import NonFiniteError
from trainer_contract.trainer import Trainer
from trainer_contract.types import Float32

#: One rollout in `_ONE_IN` is measured.
_ONE_IN: Final = 16
#: The name of the figure.
EXACT_ENTROPY: Final = "exact_entropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredEntropy:
    """The entropy of one step.

    Attributes:
        figures: the mean, in nats per sampled token; {} if nothing was measured.
        of_tokens: by rollout of the batch, the entropy of each of its sampled tokens, f32 [N]; {} if the trainer only
            reports the mean.
    """

    figures: dict[str, float] = field(default_factory=dict)
    of_tokens: Mapping[int, Float32] = field(default_factory=dict)


@final
@dataclass(frozen=True, slots=True)
class EntropyMeter:
    """Measures every step whose version is divisible by `interval_steps`; 0 for none.

    `kept(version, groups)` returns which groups of the step that makes the version are in the sample log.
    """

    interval_steps: int = 0
    kept: Callable[[int, int], Sequence[int]] = lambda version, groups: ()

    def measure(self, policy: Trainer, batch: TrainBatch) -> MeasuredEntropy:
        """Measure at the weights from which the step starts. No gradient may be accumulated before, and none is
        left.
        """
        if self.interval_steps == 0 or batch.producing % self.interval_steps:
            return MeasuredEntropy()
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
        chosen, probe = self._chosen(batch), EntropyProbe()
        measured_rollouts = [rollouts[row] for row in chosen]
        micro_batch = alone(measured_rollouts)
        try:
            (measured,) = policy.backward([micro_batch], probe)
        except NonFiniteError:  # the step finds the cause and reports it
            return MeasuredEntropy()
        finally:
            policy.discard_gradient()
        return MeasuredEntropy(
            figures={EXACT_ENTROPY: measured.loss},
            of_tokens=dict(zip(chosen, _by_rollout(measured_rollouts, probe.seen), strict=False)),
        )

    def _chosen(self, batch: TrainBatch) -> list[int]:
        """Return rows of rollouts that the step computes, whatever their length."""
        computed = {row for number in range(len(batch.packed)) for row in batch.rollouts_of(number)}
        members = sorted(computed)
        count, ends = -(-len(members) // _ONE_IN), np.cumsum([len(group.rollouts) for group in batch.groups]).tolist()
        kept = (
            [row for row in range(ends[number] - len(batch.groups[number].rollouts), ends[number]) if row in computed]
            for number in self.kept(batch.producing, len(batch.groups))
        )
        in_turn = (row for row in chain.from_iterable(zip_longest(*kept)) if row is not None)
        looked_at = list(islice(in_turn, (count + 1) // 2))
        others = [member for member in members if member not in looked_at]
        spaced = others[:: -(-len(others) // (count - len(looked_at)))] if count > len(looked_at) else []
        return sorted(looked_at + spaced)


def _by_rollout(rollouts: Sequence[Rollout], seen: Sequence[Float32]) -> list[Float32]:
    """Return the entropies of each rollout, turn after turn; none unless the probe has seen all tokens."""
    lengths = [rollout.num_sampled_tokens for rollout in rollouts]
    if len(seen) != 1 or len(seen[0]) != sum(lengths):
        return []
    table = SegmentTable.of(rollouts)
    entropies = np.empty_like(seen[0])
    entropies[table.rows(range(len(table.owners)))] = seen[0]
    return np.split(entropies, np.cumsum(lengths)[:-1])
