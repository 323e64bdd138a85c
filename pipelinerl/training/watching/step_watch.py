"""The training loop's reports on how groups end and what each step consists of.

Watching has no influence on training. Between two steps it keeps a tally and one group as an example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from pipelinerl.training.rollouts.admission import GroupOutcome
from pipelinerl.training.rollouts.batch import TrainBatch
from pipelinerl.training.watching.domain_figures import DomainTallies, StepFigures
from pipelinerl.training.watching.training_samples import FilteredGroups, StepRollouts, TrainedTokens, TrainingSamples
from pipelinerl.types import RolloutGroup
from trainer_contract.types import Float32, LossStats, MicroBatch

#: Number of reasons counted separately in a step: those of a user's filter may all differ.
MOST_REASONS: Final = 20
OTHER_REASONS: Final = "other reasons"


@final
@dataclass(slots=True)
class StepWatch:
    """Recorder of what ends between two steps; `samples` is None if no samples are kept."""

    samples: TrainingSamples | None = None
    _tallies: DomainTallies = field(default_factory=DomainTallies)
    _filtered: Counter[str] = field(default_factory=Counter)
    _example: tuple[RolloutGroup, str] | None = None

    def ended(self, groups: Iterable[RolloutGroup], fate: GroupOutcome, why: str) -> None:
        """Record groups that ended without training: filtered for the reason `why`, or stale."""
        for group in groups:
            if fate is GroupOutcome.STALE:
                self._tallies.add_stale(group)
                continue
            self._tallies.add([group])
            self._filtered[why if why in self._filtered or len(self._filtered) < MOST_REASONS else OTHER_REASONS] += 1
            self._example = (group, why)

    def stepped(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[MicroBatch],
        *,
        version: int,
        losses: Sequence[LossStats | None] = (),
        entropies: Mapping[int, Float32] = MappingProxyType({}),
    ) -> StepFigures:
        """Return the figures since the last step, and write samples of the step that made `version`.

        Args:
            micro_batches: those of the batch, with the advantages on which they trained.
            losses: of each at the weights from which the step started, if known.
            entropies: of the sampled tokens of some rollouts at these weights.
        """
        self._tallies.add(batch.groups)
        if self.samples is not None:
            filtered = None
            if self._example is not None:
                group, why = self._example
                filtered = FilteredGroups(counts=dict(self._filtered), example=group, why=why)
            self.samples.write(version, _rollouts(batch, micro_batches, losses, entropies), filtered)
        self._filtered, self._example = Counter(), None
        return self._tallies.take()


def _rollouts(
    batch: TrainBatch,
    micro_batches: Sequence[MicroBatch],
    losses: Sequence[LossStats | None],
    entropies: Mapping[int, Float32],
) -> StepRollouts:
    advantages, trained = mean_advantages(batch, micro_batches)
    return StepRollouts(
        groups=batch.groups,
        shaped=batch.scored.rewards,
        advantages=advantages,
        trained=trained,
        tokens_of=lambda row: _tokens_of(row, batch, micro_batches, losses, entropies),
    )


def _tokens_of(
    row: int,
    batch: TrainBatch,
    micro_batches: Sequence[MicroBatch],
    losses: Sequence[LossStats | None],
    entropies: Mapping[int, Float32],
) -> TrainedTokens | None:
    own = batch.segments.of_rollout(row)
    start, length = int(batch.scored.lengths[:row].sum()), int(batch.scored.lengths[row])
    advantages, logprobs = np.zeros(length, np.float32), np.zeros(length, np.float32)
    trained, has_logprobs = False, bool(losses)
    for number, (packed, micro_batch) in enumerate(zip(batch.packed, micro_batches, strict=True)):
        loss = losses[number] if losses else None
        for place, member in enumerate(packed.members):
            if member not in own:
                continue
            first, end = np.searchsorted(micro_batch.segment_ids, (place, place + 1)).tolist()
            mask, rows = micro_batch.loss_mask[first:end], batch.segments.rows([member]) - start
            trained = True
            advantages[rows] = micro_batch.advantages[first:end][mask]
            if loss is None:
                has_logprobs = False
            else:
                logprobs[rows] = loss.predictions[first:end][mask]
    if not trained:
        return None
    return TrainedTokens(
        advantages=advantages, logprobs=logprobs if has_logprobs else None, entropies=entropies.get(row)
    )


def mean_advantages(
    batch: TrainBatch, micro_batches: Sequence[MicroBatch]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the mean advantage over each rollout's sampled tokens [B], and whether the rollout was in the step [B].

    A rollout left out of the packing because its advantages are all zero has 0; one that may not learn has NaN.
    """
    sums, trained = np.zeros(len(batch.learns)), np.zeros(len(batch.learns), bool)
    for number, micro_batch in enumerate(micro_batches):
        rollouts = np.array(batch.rollouts_of(number))
        of_tokens = rollouts[micro_batch.segment_ids[micro_batch.loss_mask]]
        sums += np.bincount(of_tokens, micro_batch.advantages[micro_batch.loss_mask], minlength=len(sums))
        trained[rollouts] = True
    means = sums / np.maximum(batch.scored.lengths, 1)
    return np.where(trained | batch.learns, means, np.nan), trained
