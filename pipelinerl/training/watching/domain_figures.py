"""Figures by domain and by tag of all groups that arrived since the last step, whatever their outcome. Pure.

    rollouts, groups      number of fresh ones: trained or filtered
    reward, reward.<part> mean over the judged rollouts; of a part, over those that have it
    accuracy              share of the judged rollouts that are right
    length_mean, _p95     sampled tokens
    truncated, unjudged   share of the rollouts that ran out of tokens; that no verifier has judged
    all_right, all_wrong  share of the judged groups without a signal, of either kind
    stale, stale_groups   share and number of the groups that were dropped as too old
    turns, segments       of episodes: mean number of turns, and of the segments that they train as
    segments.<reason>     segments that began for this reason (`environments.episode.NewSegment`)

The figures of a step cover the rollouts on which it trains. These figures cover what the model does in a domain: they
include filtered groups, because a filter would otherwise hide solved and hopeless problems.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self, final

from inference_contract.schemas import FinishReason
from pipelinerl.types import Outcome, RolloutGroup

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
