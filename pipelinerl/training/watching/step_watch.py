"""The training loop's reports on how groups end and what each step consists of.

Watching has no influence on training. Between two steps it keeps a tally and one group as an example.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from inference_contract.schemas import FinishReason
from pipelinerl.training.rollouts.admission import GroupOutcome
from pipelinerl.training.rollouts.batch import TrainBatch
from pipelinerl.training.watching.training_samples import FilteredGroups, StepRollouts, TrainedTokens, TrainingSamples
from pipelinerl.types import Outcome, RolloutGroup
from trainer_contract.types import Float32, LossStats, MicroBatch

#: Number of reasons counted separately in a step: those of a user's filter may all differ.
MOST_REASONS: Final = 20
OTHER_REASONS: Final = "other reasons"


@final
@dataclass(slots=True)
class DomainTallies:
    """Tallies since the last step, by domain and tag."""

    _domains: dict[str, Tally] = field(default_factory=dict)
    _tags: dict[str, Tally] = field(default_factory=dict)

    def add(self, groups: Iterable[RolloutGroup]) -> None:
        """Count groups that were trained or filtered."""
        for group in groups:
            self._merge(group, Tally.of(group))

    def add_stale(self, group: RolloutGroup) -> None:
        """Count a group that was too old."""
        self._merge(group, Tally(stale=1))

    def take(self) -> StepFigures:
        """Return the figures and reset the tallies."""
        domains, tags = self._domains, _bounded(self._tags)
        self._domains, self._tags = {}, {}
        return StepFigures(_figures(domains), _figures(tags))

    def _merge(self, group: RolloutGroup, counts: Tally) -> None:
        self._domains.setdefault(group.domain, Tally()).merge(counts)
        for tag in dict.fromkeys(group.problem.tags[:_MOST_OF_A_GROUP]):
            self._tags.setdefault(tag, Tally()).merge(counts)


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


#: Number of tags with figures of their own in a step, by rollouts; the rest are counted together.
MOST_TAGS: Final = 50
#: Name of the remaining tags.
OTHER_TAGS: Final = "other"
#: Bound of the counted tags of a group, and of the parts of a reward.
_MOST_OF_A_GROUP: Final = 16


class StepFigures(NamedTuple):
    """Figures by name, for each domain and each tag."""

    by_domain: dict[str, dict[str, float]]
    by_tag: dict[str, dict[str, float]]


@final
@dataclass(slots=True)
class Tally:
    """Counts over groups of one kind."""

    groups: int = 0
    stale: int = 0
    judged_groups: int = 0
    all_right: int = 0
    all_wrong: int = 0
    judged: int = 0
    right: int = 0
    truncated: int = 0
    reward: float = 0.0
    episodes: int = 0
    turns: int = 0
    begun: Counter[str] = field(default_factory=Counter)
    parts: dict[str, tuple[float, int]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, group: RolloutGroup) -> Self:
        """Return the counts of one group that was trained or filtered."""
        counts, judged, right, wrong = cls(groups=1), 0, 0, 0
        for rollout in group.rollouts:
            verdict = rollout.verdict
            outcome = verdict.outcome
            counts.lengths.append(rollout.num_sampled_tokens)
            counts.truncated += rollout.finish_reason == FinishReason.LENGTH
            if rollout.turns and rollout.turns[0].agent:
                counts.episodes += 1
                counts.turns += len(rollout.turns)
                counts.begun.update(turn.begins for turn in rollout.turns if turn.begins)
            is_right, is_wrong = outcome is Outcome.CORRECT, outcome is Outcome.WRONG
            if is_right or is_wrong or outcome.is_judgement:
                judged += 1
                right += is_right
                wrong += is_wrong
                counts.reward += verdict.reward
                for name, reward in verdict.parts[:_MOST_OF_A_GROUP]:
                    total, count = counts.parts.get(name, (0.0, 0))
                    counts.parts[name] = (total + reward, count + 1)
        counts.judged, counts.right = judged, right
        counts.judged_groups = int(judged > 0)
        counts.all_right, counts.all_wrong = int(judged > 0 and right == judged), int(judged > 0 and wrong == judged)
        return counts

    def merge(self, other: Tally) -> None:
        """Add the counts of another tally."""
        self.groups += other.groups
        self.stale += other.stale
        self.judged_groups += other.judged_groups
        self.all_right += other.all_right
        self.all_wrong += other.all_wrong
        self.judged += other.judged
        self.right += other.right
        self.truncated += other.truncated
        self.reward += other.reward
        self.lengths += other.lengths
        self.episodes += other.episodes
        self.turns += other.turns
        self.begun += other.begun
        for name, (total, count) in other.parts.items():
            before, number = self.parts.get(name, (0.0, 0))
            self.parts[name] = (before + total, number + count)

    def figures(self) -> dict[str, float]:
        """Return the figures of the module's table by name, without those that have no count."""
        rollouts = len(self.lengths)
        figures: dict[str, float] = {
            "rollouts": rollouts,
            "groups": self.groups,
            "stale_groups": self.stale,
            "stale": self.stale / max(1, self.stale + self.groups),
        }
        if rollouts:
            figures["length_mean"] = sum(self.lengths) / rollouts
            figures["length_p95"] = _percentile(sorted(self.lengths), 0.95)
            figures["truncated"] = self.truncated / rollouts
            figures["unjudged"] = 1 - self.judged / rollouts
        if self.episodes:
            figures["turns"] = self.turns / self.episodes
            figures["segments"] = self.begun.total() / self.episodes
            figures |= {f"segments.{reason}": count for reason, count in sorted(self.begun.items())}
        if self.judged:
            figures["reward"] = self.reward / self.judged
            figures["accuracy"] = self.right / self.judged
            figures["all_right"] = self.all_right / self.judged_groups
            figures["all_wrong"] = self.all_wrong / self.judged_groups
            figures |= {f"reward.{name}": total / count for name, (total, count) in self.parts.items()}
        return figures


def _percentile(rising: Sequence[int], share: float) -> float:
    """Return numpy's percentile, linearly interpolated. numpy takes fifty times as long for short lists."""
    place = share * (len(rising) - 1)
    below = int(place)
    above = min(below + 1, len(rising) - 1)
    return rising[below] + (rising[above] - rising[below]) * (place - below)


def _bounded(tags: Mapping[str, Tally]) -> dict[str, Tally]:
    """Return the tags with most rollouts, by name, and the others as one."""
    ranked = sorted(tags, key=lambda tag: (-len(tags[tag].lengths), tag))
    kept = {tag: tags[tag] for tag in sorted(ranked[:MOST_TAGS])}
    for tag in ranked[MOST_TAGS:]:
        kept.setdefault(OTHER_TAGS, Tally()).merge(tags[tag])
    return kept


def _figures(tallies: Mapping[str, Tally]) -> dict[str, dict[str, float]]:
    return {name: tally.figures() for name, tally in tallies.items()}
