"""Admission of rollout groups to training, by staleness, duplicates and signal; and the ledger of their outcomes.

The staleness bound k is the most versions by which a group's oldest token may precede the version that a step makes.

An order is the controller's request for one group, and a group has the index of its order. Each group that is read
ends as trained, stale or filtered (no signal, no valid verdict, not computable, or in a skipped step); an order may
also fail without a group. Duplicates are not counted, nor are groups sampled by abandoned weights (see `Lineage`),
whose orders are issued again. The ledger stores a frontier, below which all orders have ended, and the ended orders
beyond it. This module does no I/O.

Groups with only correct answers are reported to the controller, which then skips their problems for a while
(`controller/state/cooldown.py`). Checkpoints include reports that the controller has not acknowledged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, Self

import numpy as np

from pipelinerl.enums import StalenessScope
from pipelinerl.messages import has_ended
from pipelinerl.objective.adv import Credit
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.reward import RewardShaping, Scored
from pipelinerl.objective.streams import ONE_LOSS, DomainLosses, Loss
from pipelinerl.staleness import StalenessBounds
from pipelinerl.training.batch import BatchRules
from pipelinerl.training.packing import alone
from pipelinerl.types import Outcome, Rollout, RolloutGroup, Turn
from trainer_contract.batch import check
from trainer_contract.errors import BatchError
from trainer_contract.types import RoutingShape

#: Minimum number of fresh rollouts with which a group still trains if its other rollouts are too old.
LEAST_LEFT: Final = 2
#: Pairs (order, problem id) of groups, by domain.
Pairs = dict[str, list[tuple[int, str]]]


class GroupOutcome(StrEnum):
    """The outcome of an order for a group: trained, filtered, dropped as stale, or failed."""

    TRAINED = "trained"
    FILTERED = "filtered"
    STALE = "stale"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Lineage:
    """The weights that this trainer continues: its own epoch and first version, and those of `earlier` trainers.

    An epoch is one incarnation of the trainer. Weights of an earlier epoch are ancestors of the current ones up to the
    lowest version at which a later epoch began; newer weights of that earlier epoch are abandoned. Epochs without a
    checkpoint need no entry, because none of their own weights are ancestors.
    """

    epoch: int
    began_at: int
    earlier: tuple[tuple[int, int], ...] = ()

    @property
    def epochs(self) -> tuple[tuple[int, int], ...]:
        """Each epoch as (epoch, version at which it began), ending with this trainer's."""
        return (*self.earlier, (self.epoch, self.began_at))

    def includes(self, group: RolloutGroup) -> bool:
        """Return whether all tokens of the group were sampled by ancestors of the current weights."""
        return all(
            rollout.epoch >= self.epoch or rollout.newest_version <= self._newest_of(rollout.epoch)
            for rollout in group.rollouts
        )

    def issued(self, group: RolloutGroup) -> bool:
        epoch, version = group.issued_at
        return epoch >= self.epoch or version <= self._newest_of(epoch)

    def _newest_of(self, epoch: int) -> int:
        return min(began_at for later, began_at in self.epochs if later > epoch)


class Proof(StrEnum):
    """State of the proof that a group's engines computed with the weights that they reported."""

    COMPLETE = "complete"
    AWAITED = "awaited"
    """An engine may still answer the canary."""
    MISSING = "missing"
    """There will be no proof: the engine has failed, has left, or has got other weights."""


def versions_of(group: RolloutGroup) -> set[int]:
    """Return the versions that sampled the group's tokens."""
    spans = (span for rollout in group.rollouts for turn in rollout.turns for span in turn.spans)
    return {span.model_version for span in spans}


@dataclass(slots=True)
class ConsumedLedger:
    """The trainer's record of orders (requests for a group): which have ended, and how many with each outcome."""

    frontier: int = 0
    """All orders with a lower index have ended."""
    beyond: set[int] = field(default_factory=set)
    """Indices of ended orders at or above the frontier."""
    counts: dict[GroupOutcome, int] = field(default_factory=lambda: dict.fromkeys(GroupOutcome, 0))

    def has(self, index: int) -> bool:
        return has_ended(index, self.frontier, self.beyond)

    def settle(self, indices: Iterable[int], outcome: GroupOutcome) -> None:
        """Record the outcome of orders; each may end only once."""
        for index in indices:
            if self.has(index):
                raise ValueError(f"order {index} ended twice; the second time as {outcome}")
            self.beyond.add(index)
            self.counts[outcome] += 1
        while self.frontier in self.beyond:
            self.beyond.remove(self.frontier)
            self.frontier += 1

    def reopen(self, indices: Collection[int], outcome: GroupOutcome) -> None:
        """Remove the outcome of orders that no report has named yet, so that they may end again."""
        self.counts[outcome] -= len(indices)
        first = min([self.frontier, *indices])
        self.beyond.update(range(first, self.frontier))
        self.beyond.difference_update(indices)
        self.frontier = first

    def to_record(self) -> dict[str, Any]:
        return {
            "frontier": self.frontier,
            "beyond": sorted(self.beyond),
            "counts": {str(outcome): n for outcome, n in self.counts.items()},
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Self:
        counts = {outcome: int(record["counts"].get(str(outcome), 0)) for outcome in GroupOutcome}
        return cls(int(record["frontier"]), set(record["beyond"]), counts)


class SolvedProblems:
    """The orders whose groups had only correct answers, to be reported to the controller; oldest first."""

    def __init__(self, restored: Mapping[str, Sequence[Sequence[Any]]] | None = None) -> None:
        self._waiting: list[tuple[str, int, str]] = [
            (domain, int(order), str(name)) for domain, pairs in (restored or {}).items() for order, name in pairs
        ]
        self._reported: tuple[str, int] = ("", 0)

    def note(self, groups: Iterable[RolloutGroup]) -> None:
        for group in groups:
            solved = group.domain, group.index, group.problem.problem_id
            if solved[-1] and all(each.verdict.outcome is Outcome.CORRECT for each in group.rollouts):
                self._waiting += [] if solved in self._waiting else [solved]

    @property
    def pending(self) -> Pairs:
        """The pairs (order, problem id) that the controller has not acknowledged, by domain."""
        pairs: Pairs = {}
        for domain, order, name in self._waiting:
            pairs.setdefault(domain, []).append((order, name))
        return pairs

    def report(self, report_id: str) -> Pairs:
        self._reported = (report_id, len(self._waiting))
        return self.pending

    def answered(self, report_id: str) -> None:
        """Drop the orders that were sent in the report with this id, since the controller has answered it."""
        if report_id == self._reported[0]:
            del self._waiting[: self._reported[1]]
            self._reported = ("", 0)


def signal_of(objective: PolicyObjective, losses: DomainLosses = ONE_LOSS) -> Callable[[RolloutGroup], bool]:
    """Return a function that tells whether a group's rewards differ, as the advantage estimator compares them (of
    rollouts, turns or parts); always True for a domain whose loss is not RL.
    """
    by_turns, by_parts = objective.adv.credit is Credit.TURNS, objective.adv.needs_parts

    def signal(group: RolloutGroup) -> bool:
        if losses.of(group.domain) is not Loss.RL or has_signal(group):
            return True
        judged = [rollout for rollout in group.rollouts if rollout.verdict.outcome.is_judgement]
        if by_turns:
            return len({tuple(turn.reward for turn in rollout.turns) for rollout in judged}) > 1
        return by_parts and len({rollout.verdict.parts for rollout in judged}) > 1

    return signal


def has_signal(group: RolloutGroup) -> bool:
    """Return whether the rollouts with a valid verdict have different rewards, as a group baseline needs."""
    rewards = [rollout.verdict.reward for rollout in group.rollouts if rollout.verdict.outcome.is_judgement]
    return len(rewards) > 1 and bool(np.ptp(rewards) > 0)


def teacher(objective: PolicyObjective, rules: BatchRules) -> Callable[[RolloutGroup], bool]:
    """Return a function that tells whether a group has a signal, and a rollout with a verdict that is not masked."""
    signal = is_judged if learns_from_equals(objective, rules.shaping) else signal_of(objective, rules.losses)

    def teaches(group: RolloutGroup) -> bool:
        return signal(group) and any(
            rollout.verdict.outcome.is_judgement and not rules.masks(rollout) for rollout in group.rollouts
        )

    return teaches


def learns_from_equals(objective: PolicyObjective, shaping: Mapping[str, RewardShaping]) -> bool:
    """Return whether a group can have a gradient although all its verdicts are equal."""
    punished = any(how.overlong_tokens for how in shaping.values())
    if objective.late_columns or not objective.zero_advantage_is_idle or punished:
        return True
    ones = np.ones(4, np.intp)
    equals = Scored(
        rewards=np.array([1.0, 1.0, 0.0, 0.0]), groups=np.array([0, 0, 1, 1]), lengths=ones, valid=ones.astype(bool)
    )
    return bool(objective.adv.advantages(equals, {}).any())


def is_judged(group: RolloutGroup) -> bool:
    """Return whether at least one rollout of the group has a valid verdict and tokens to train on."""
    return any(_trains(rollout) for rollout in group.rollouts)


def fault_of(group: RolloutGroup, *, vocab_size: int | None, routing: RoutingShape | None = None) -> str:
    """Return why no trainer can compute the group's rollouts with a verdict, such as an invalid token id or, if
    `routing` is given, recorded experts of another shape; "" if there is no fault.
    """
    judged = alone([rollout for rollout in group.rollouts if _trains(rollout)])
    if routing is None:
        judged = replace(judged, routed_experts=None)
    elif judged.routed_experts is None:
        return "routed_experts must come with every rollout, since the trainer replays them, and some have none"
    try:
        check(judged, vocab_size=vocab_size or 2**31, routing=routing)
    except BatchError as error:
        return str(error)
    return ""


def without_routing(group: RolloutGroup) -> RolloutGroup:
    """Return a copy of the group without recorded expert choices."""
    if all(turn.routed_experts is None for rollout in group.rollouts for turn in rollout.turns):
        return group

    def bare(turn: Turn) -> Turn:
        return replace(turn, routed_experts=None, context_routed_experts=None)

    rollouts = tuple(replace(rollout, turns=tuple(map(bare, rollout.turns))) for rollout in group.rollouts)
    return replace(group, rollouts=rollouts)


def fresh_part(
    group: RolloutGroup, *, producing: int, bounds: StalenessBounds, scope: StalenessScope
) -> RolloutGroup | None:
    """Return the part of the group that may train the step that makes version `producing`, or None; with
    `StalenessScope.ROLLOUT`, at least `LEAST_LEFT` rollouts, as a single one has no baseline.
    """
    if bounds.accepts(producing=producing, oldest=group.oldest_version):
        return group
    if scope is StalenessScope.GROUP:
        return None
    left = [each for each in group.rollouts if bounds.accepts(producing=producing, oldest=each.oldest_version)]
    return replace(group, rollouts=tuple(left)) if len(left) >= LEAST_LEFT else None


def _trains(rollout: Rollout) -> bool:
    return rollout.verdict.outcome.is_judgement and rollout.num_sampled_tokens > 0
