"""Metrics of the groups that ended since the last step, by domain and by tag; they do not influence training."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final, NamedTuple

from inference_contract.schemas import FinishReason
from pipelinerl.types import Outcome, RolloutGroup

#: Maximum number of tags with their own metrics in a step. Those with most rollouts are chosen; all others are counted
#: together, under the name `OTHER_TAGS`.
MOST_TAGS: Final = 50
OTHER_TAGS: Final = "other"
#: Maximum number of tags that are counted and recorded for one group, and the same for parts of a reward.
MOST_OF_A_GROUP: Final = 16


class StepFigures(NamedTuple):
    """Metrics by name, for each domain and each tag."""

    by_domain: dict[str, dict[str, float]]
    by_tag: dict[str, dict[str, float]]


class DomainMetrics:
    """Counts of the groups that ended since the last step, by domain and by tag."""

    def __init__(self) -> None:
        self._domains: dict[str, Tally] = {}
        self._tags: dict[str, Tally] = {}

    def add(self, groups: Iterable[RolloutGroup], *, stale: bool = False) -> None:
        """Count groups that were trained or filtered or, with `stale`, dropped as stale."""
        for group in groups:
            counts = Tally(stale=1) if stale else tally_of(group)
            self._domains.setdefault(group.domain, Tally()).merge(counts)
            for tag in dict.fromkeys(group.problem.tags[:MOST_OF_A_GROUP]):
                self._tags.setdefault(tag, Tally()).merge(counts)

    def take(self) -> StepFigures:
        """Return metrics of the groups since the last call, and reset the counts."""
        tallies = self._domains, _bounded(self._tags)
        self._domains, self._tags = {}, {}
        return StepFigures(*({name: tally.figures() for name, tally in each.items()} for each in tallies))


@dataclass(slots=True)
class Tally:
    """Counts of groups and rollouts of one domain or tag."""

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
    parts: Counter[str] = field(default_factory=Counter)
    part_counts: Counter[str] = field(default_factory=Counter)
    lengths: list[int] = field(default_factory=list)

    def merge(self, other: Tally) -> None:
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, Counter):
                mine.update(theirs)  # unlike +=, which drops sums that are not positive
            else:
                setattr(self, each.name, operator.iadd(mine, theirs))

    def figures(self) -> dict[str, float]:
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
            figures |= {f"reward.{name}": total / self.part_counts[name] for name, total in self.parts.items()}
        return figures


def tally_of(group: RolloutGroup) -> Tally:
    """Return the counts of one group that was trained or filtered."""
    counts, wrong = Tally(groups=1), 0
    for rollout in group.rollouts:
        verdict = rollout.verdict
        counts.lengths.append(rollout.num_sampled_tokens)
        counts.truncated += rollout.finish_reason == FinishReason.LENGTH
        if rollout.turns and rollout.turns[0].agent:
            counts.episodes += 1
            counts.turns += len(rollout.turns)
            counts.begun.update(turn.begins for turn in rollout.turns if turn.begins)
        if verdict.outcome.is_judgement:
            counts.judged += 1
            counts.right += verdict.outcome is Outcome.CORRECT
            wrong += verdict.outcome is Outcome.WRONG
            counts.reward += verdict.reward
            for name, reward in verdict.parts[:MOST_OF_A_GROUP]:
                counts.parts[name] += reward  # type: ignore[assignment]  # Counter declares int values, sums are floats
                counts.part_counts[name] += 1
    if counts.judged:
        counts.judged_groups = 1
        counts.all_right, counts.all_wrong = int(counts.right == counts.judged), int(wrong == counts.judged)
    return counts


def _percentile(rising: Sequence[int], share: float) -> float:
    """Return the linearly interpolated percentile of a sorted list; on short lists, numpy's is 50 times slower."""
    place = share * (len(rising) - 1)
    below = int(place)
    above = min(below + 1, len(rising) - 1)
    return rising[below] + (rising[above] - rising[below]) * (place - below)


def _bounded(tags: Mapping[str, Tally]) -> dict[str, Tally]:
    ranked = sorted(tags, key=lambda tag: (-len(tags[tag].lengths), tag))
    kept = {tag: tags[tag] for tag in sorted(ranked[:MOST_TAGS])}
    for tag in ranked[MOST_TAGS:]:
        kept.setdefault(OTHER_TAGS, Tally()).merge(tags[tag])
    return kept
