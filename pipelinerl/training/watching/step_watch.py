"""`StepWatch`: what the training loop tells those who watch: it notes how groups end, and what each step was made of.

It only looks. Nothing that trains depends on it, and what it keeps between two steps is a tally, one group as an
example, and nothing else.
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

#: So many reasons are told apart in one step: those of a user's filter may all differ.
MOST_REASONS: Final = 20
OTHER_REASONS: Final = "other reasons"


@final
@dataclass(slots=True)
class StepWatch:
    """Notes what ends between two steps; `samples` is None where no samples are kept."""

    samples: TrainingSamples | None = None
    _tallies: DomainTallies = field(default_factory=DomainTallies)
    _filtered: Counter[str] = field(default_factory=Counter)
    _example: tuple[RolloutGroup, str] | None = None

    def ended(self, groups: Iterable[RolloutGroup], fate: GroupOutcome, why: str) -> None:
        """Groups ended without training: filtered, for this reason, or stale."""
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
        """A step on the batch has made `version`: figures of what came since the one before, and samples of it.

        Args:
            micro_batches: those of the batch with the advantages that they were trained with.
            losses: what each gave at the weights that the step began with, as far as it is known.
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
    for number, (packed, micro_batch) in enumerate(zip(batch.packed, micro_batches, strict=True)):
        if row in packed.members:
            place = packed.members.index(row)
            start, end = np.searchsorted(micro_batch.segment_ids, (place, place + 1)).tolist()
            mask = micro_batch.loss_mask[start:end]
            loss = losses[number] if losses else None
            logprobs = None if loss is None else loss.predictions[start:end][mask]
            advantages = micro_batch.advantages[start:end][mask]
            return TrainedTokens(advantages=advantages, logprobs=logprobs, entropies=entropies.get(row))
    return None


def mean_advantages(
    batch: TrainBatch, micro_batches: Sequence[MicroBatch]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """([B], [B]): mean advantage over the sampled tokens of each rollout, and whether it was in the step.

    One that was left out of the packing, since its advantages are all zero, has 0; one that may not learn has NaN.
    """
    advantages = np.where(batch.learns, 0.0, np.nan)
    trained = np.zeros(len(advantages), bool)
    for packed, micro_batch in zip(batch.packed, micro_batches, strict=True):
        segments = micro_batch.segment_ids[micro_batch.loss_mask]
        sums = np.bincount(segments, micro_batch.advantages[micro_batch.loss_mask], minlength=len(packed.members))
        counts = np.bincount(segments, minlength=len(packed.members))
        advantages[packed.members] = sums / np.maximum(counts, 1)
        trained[packed.members] = True
    return advantages, trained
