"""Which rollout groups may train: the staleness bound k, duplicates, signal, and the account of all of it.

Pure. A group that is read ends in exactly one of: trained, filtered (no signal, no valid verdict, not computable, or in
a step that was skipped since something was not finite), stale; an order that failed never comes and ends so. A
duplicate of one that already ended, or is waiting, counts nowhere; nor does a group that abandoned weights have
sampled, whose order is issued again. What ended is remembered as a frontier and a sparse set, so that the memory is
bounded by how far groups overtake one another.

Which groups were all right is kept until the controller has heard of it, who passes such problems over for a while
(`controller/state/cooldown.py`). What it has not answered for lies in the checkpoint, so that a run that goes on from
there knows as much as it did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, Self, final

import numpy as np

from pipelinerl.enums import StalenessScope
from pipelinerl.messages import has_ended
from pipelinerl.staleness import StalenessBounds
from pipelinerl.training.rollouts.packing import alone, with_columns
from pipelinerl.types import Outcome, Rollout, RolloutGroup, Turn
from trainer_contract.batch import check
from trainer_contract.errors import BatchError
from trainer_contract.types import RoutingShape

#: So many rollouts of a group at least are left when others of it are too old.
LEAST_LEFT: Final = 2
#: By domain, the order and the problem's id.
Pairs = dict[str, list[tuple[int, str]]]


class GroupOutcome(StrEnum):
    """How a group ended."""

    TRAINED = "trained"
    FILTERED = "filtered"
    STALE = "stale"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Lineage:
    """Which weights this trainer descends from: its epoch, the version at which that began, and the same of `earlier`.

    Weights of an earlier epoch are ancestors up to the lowest version that any epoch after it began at; what it made
    later was abandoned, whatever versions the line has reached since. An epoch that left no checkpoint is in no list,
    and needs none: whoever came after it began where it did, or below.
    """

    epoch: int
    began_at: int
    earlier: tuple[tuple[int, int], ...] = ()

    @property
    def epochs(self) -> tuple[tuple[int, int], ...]:
        """Every (epoch, version it began at), this one last."""
        return (*self.earlier, (self.epoch, self.began_at))

    def includes(self, group: RolloutGroup) -> bool:
        """Were all tokens of the group sampled by ancestors of the current weights?"""
        return all(
            rollout.epoch >= self.epoch or rollout.newest_version <= self._newest_of(rollout.epoch)
            for rollout in group.rollouts
        )

    def _newest_of(self, epoch: int) -> int:
        return min(began_at for later, began_at in self.epochs if later > epoch)


@final
@dataclass(slots=True)
class ConsumedLedger:
    """Indices of the orders that ended, and how many ended how. The trainer's part of the account."""

    frontier: int = 0
    """Every index below has ended."""
    beyond: set[int] = field(default_factory=set)
    """Indices at or above the frontier that have ended."""
    counts: dict[GroupOutcome, int] = field(default_factory=lambda: dict.fromkeys(GroupOutcome, 0))

    def has(self, index: int) -> bool:
        """Has this order ended?"""
        return has_ended(index, self.frontier, self.beyond)

    def settle(self, indices: Iterable[int], fate: GroupOutcome) -> None:
        """Record the end of orders; each may end once."""
        for index in indices:
            if self.has(index):
                raise ValueError(f"order {index} ended twice; the second time as {fate}")
            self.beyond.add(index)
            self.counts[fate] += 1
        while self.frontier in self.beyond:
            self.beyond.remove(self.frontier)
            self.frontier += 1

    def revise(self, indices: Iterable[int], *, before: GroupOutcome, after: GroupOutcome) -> None:
        """Orders that were settled as `before` ended as `after`, as it turned out."""
        number = len(list(indices))
        self.counts[before] -= number
        self.counts[after] += number

    def to_record(self) -> dict[str, Any]:
        """Plain values, for a checkpoint or a report."""
        return {
            "frontier": self.frontier,
            "beyond": sorted(self.beyond),
            "counts": {str(fate): n for fate, n in self.counts.items()},
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        """Inverse of `to_record`."""
        counts = {fate: int(record["counts"].get(str(fate), 0)) for fate in GroupOutcome}
        return cls(int(record["frontier"]), set(record["beyond"]), counts)


@final
class SolvedProblems:
    """The orders of the groups that were all right, in the order in which they ended."""

    def __init__(self, restored: Mapping[str, Sequence[Sequence[Any]]] | None = None) -> None:
        """`restored` is what a checkpoint holds."""
        self._waiting: list[tuple[str, int, str]] = [
            (domain, int(order), str(name)) for domain, pairs in (restored or {}).items() for order, name in pairs
        ]
        self._reported: tuple[str, int] = ("", 0)

    def note(self, groups: Iterable[RolloutGroup]) -> None:
        """Groups have ended, trained or filtered. One with an answer that nobody judged is not all right."""
        for group in groups:
            if group.problem.problem_id and all(each.verdict.outcome is Outcome.CORRECT for each in group.rollouts):
                self._waiting.append((group.domain, group.index, group.problem.problem_id))

    @property
    def pending(self) -> Pairs:
        """What the controller may not know of."""
        pairs: Pairs = {}
        for domain, order, name in self._waiting:
            pairs.setdefault(domain, []).append((order, name))
        return pairs

    def report(self, report_id: str) -> Pairs:
        """What is pending, for the report of this name."""
        self._reported = (report_id, len(self._waiting))
        return self.pending

    def answered(self, report_id: str) -> None:
        """The controller has answered a report: it knows what that report said."""
        if report_id == self._reported[0]:
            del self._waiting[: self._reported[1]]
            self._reported = ("", 0)


def has_signal(group: RolloutGroup) -> bool:
    """Do the judged rewards of the group differ, so that a group baseline leaves something to learn?"""
    rewards = [r.verdict.reward for r in group.rollouts if r.verdict.outcome.is_judgement]
    return len(rewards) > 1 and bool(np.ptp(rewards) > 0)


def has_turn_signal(group: RolloutGroup) -> bool:
    """Whether judged rollouts differ in their rewards or in those of their turns: the signal where turns get credit."""
    judged = [rollout for rollout in group.rollouts if rollout.verdict.outcome.is_judgement]
    return has_signal(group) or len({tuple(turn.reward for turn in rollout.turns) for rollout in judged}) > 1


def is_judged(group: RolloutGroup) -> bool:
    """Has any rollout a valid verdict and tokens to train on?"""
    return any(_trains(rollout) for rollout in group.rollouts)


def fault_of(group: RolloutGroup, *, vocab_size: int | None, routing: RoutingShape | None = None) -> str:
    """What of a judged group no trainer can compute, such as a token id that is none; "" when there is nothing.

    An engine that serves another model, or is broken, makes such groups: every trainer that read one would end of it.

    Args:
        routing: of the routers whose choices the trainer replays, which each rollout must then have; None: of none.
    """
    judged = alone([rollout for rollout in group.rollouts if _trains(rollout)])
    if routing is None:
        judged = with_columns(judged, {"routed_experts": None})
    elif judged.routed_experts is None:
        return "routed_experts must come with every rollout, since the trainer replays them, and some have none"
    try:
        check(judged, vocab_size=vocab_size or 2**31, routing=routing)
    except BatchError as error:
        return str(error)
    return ""


def without_routing(group: RolloutGroup) -> RolloutGroup:
    """The group with no word of which experts computed its tokens."""
    if all(turn.routed_experts is None for rollout in group.rollouts for turn in rollout.turns):
        return group

    def bare(turn: Turn) -> Turn:
        return replace(turn, routed_experts=None, context_routed_experts=None)

    rollouts = tuple(replace(rollout, turns=tuple(map(bare, rollout.turns))) for rollout in group.rollouts)
    return replace(group, rollouts=rollouts)


def is_stale(group: RolloutGroup, *, producing: int, bounds: StalenessBounds) -> bool:
    """Must the group be refused for the step that produces version `producing`?"""
    return not bounds.accepts(producing=producing, oldest=group.oldest_version)


def fresh_part(
    group: RolloutGroup, *, producing: int, bounds: StalenessBounds, scope: StalenessScope
) -> RolloutGroup | None:
    """What of the group may train the step that produces version `producing`; None: nothing.

    By rollout, two or more that are left are a group; one alone has nothing to be compared with.
    """
    if not is_stale(group, producing=producing, bounds=bounds):
        return group
    if scope is StalenessScope.GROUP:
        return None
    left = [each for each in group.rollouts if bounds.accepts(producing=producing, oldest=each.oldest_version)]
    return replace(group, rollouts=tuple(left)) if len(left) >= LEAST_LEFT else None


def _trains(rollout: Rollout) -> bool:
    return rollout.verdict.outcome.is_judgement and rollout.num_sampled_tokens > 0
