"""The choice of groups for a step: which groups wait to be trained, and whether a step waits for late ones.

A batch is complete when enough rollouts (or tokens) for a step have arrived. Groups sampled by the oldest acceptable
version go first, since they would become stale next; ties go to the lowest index. Groups that become stale while they
wait are dropped.
"""

from __future__ import annotations

import bisect
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from pipelinerl.enums import NoSignal, StalenessScope
from pipelinerl.messages import Directive, NoSignalGroups
from pipelinerl.staleness import LOCKSTEP, StalenessBounds
from pipelinerl.training.rollouts.admission import (
    ConsumedLedger,
    GroupOutcome,
    Lineage,
    Proof,
    SolvedProblems,
    fault_of,
    fresh_part,
    has_signal,
    is_judged,
    versions_of,
    without_routing,
)
from pipelinerl.types import Outcome, RolloutGroup
from trainer_contract.types import RoutingShape

log = logging.getLogger("pipelinerl")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBudget:
    """The size of a step: a number of rollouts, or of tokens if that is reached first."""

    rollouts: int
    tokens: int | None = None


class Batcher:
    """The groups that wait to be trained, and the record (`ledger`) of those trained or dropped. Not thread-safe."""

    def __init__(
        self,
        *,
        ledger: ConsumedLedger,
        lineage: Lineage,
        no_signal: NoSignal,
        teaches: Callable[[RolloutGroup], bool] = has_signal,
        signal: Callable[[RolloutGroup], bool] = has_signal,
        vocab_size: int | None = None,
        routing: RoutingShape | None = None,
        ended: Callable[[Sequence[RolloutGroup], GroupOutcome, str], None] = lambda groups, outcome, why: None,
        scope: StalenessScope = StalenessScope.GROUP,
        solved: SolvedProblems | None = None,
        doubted: Iterable[tuple[str, int, int]] = (),
    ) -> None:
        """Create an empty batcher.

        `teaches` tells whether a group has a gradient, `signal` whether its rewards differ. `ended` is called with
        groups that arrived but did not train. If `routing` is given, groups must contain the MoE experts that the
        engine chose, in this shape; if it is None, such records are dropped.
        """
        self.ledger = ledger
        self.lineage = lineage
        self.solved = solved or SolvedProblems()
        self._no_signal = no_signal
        self._teaches = teaches
        self._signal = signal
        self._vocab_size = vocab_size
        self._routing = routing
        self._ended = ended
        self._scope = scope
        self._waiting: dict[int, RolloutGroup] = {}
        self.stale_tokens = 0
        """Sampled tokens of all rollouts that were dropped as stale."""
        self.stale_answers = 0
        """Rollouts that were dropped as stale."""
        self.stale_rollouts = 0
        """Rollouts that were dropped as stale from groups whose other rollouts were fresh enough."""
        self.no_signal: dict[str, NoSignalGroups] = {}
        """Counts, by domain, of groups without a gradient or excluded by the filter, since the last other group."""
        self._abandoned: list[int] = []
        self.doubted = set(doubted)
        """What engines sampled with a fault: base URL, epoch and version. A checkpoint keeps it."""
        self._sampled_again: dict[int, set[tuple[str, int, int]]] = {}
        """Versions that were in doubt when a group was abandoned; the group that is sampled again may have them."""

    @property
    def waiting(self) -> list[int]:
        return sorted(self._waiting)

    def offer(self, group: RolloutGroup, *, k: float = math.inf) -> None:
        """Let a new group wait for a step, record it as filtered, or drop it as a duplicate or as abandoned.

        A group is abandoned if it was sampled by weights that a trainer restart discarded (`Lineage`). With staleness
        bound k = 1 (lockstep), so is a group requested for a discarded step; else an earlier step could train it.
        """
        if self.ledger.has(group.index) or group.index in self._waiting:
            return
        if not (self.lineage.includes(group) and (k > LOCKSTEP or self.lineage.issued(group))):
            self._abandoned.append(group.index)
            return
        if self.is_doubtful(group):
            self._abandon_doubtful(group.index)
            return
        if not is_judged(group):
            self._filter([group], "no verdict")
            return
        self._note_signal(group)
        if self._no_signal is NoSignal.FILTER and not self._signal(group):
            self._filter([group], "no signal")
        elif group.refusal:
            self._filter([group], group.refusal)
        elif fault := fault_of(group, vocab_size=self._vocab_size, routing=self._routing):
            log.error("group %d of actor %s cannot train and is filtered: %s", group.index, group.actor, fault)
            self._filter([group], "not computable")
        else:
            self._waiting[group.index] = group if self._routing is not None else without_routing(group)

    def end(self, indices: Iterable[int], outcome: GroupOutcome) -> None:
        """Record the outcome of groups that will never arrive; ignore those that have arrived nevertheless."""
        open_ = [index for index in indices if not self.ledger.has(index) and index not in self._waiting]
        self.ledger.settle(open_, outcome)

    def doubt(self, sampled: Collection[tuple[str, int, int]]) -> None:
        """Abandon, once each, all groups with tokens that an engine sampled with a fault (base URL, epoch, version).
        What is sampled again comes from healthy engines, and is accepted.
        """
        self.doubted.update(sampled)
        for index in [index for index, group in self._waiting.items() if self.is_doubtful(group)]:
            del self._waiting[index]
            self._abandon_doubtful(index)

    def is_doubtful(self, group: RolloutGroup) -> bool:
        doubted = self.doubted - self._sampled_again.get(group.index, set()) if self.doubted else ()
        if not doubted:
            return False
        versions, epochs = versions_of(group), {rollout.epoch for rollout in group.rollouts}
        return any(
            version in versions and epoch in epochs and url in (group.engines or (url,))
            for url, epoch, version in doubted
        )

    def _abandon_doubtful(self, index: int) -> None:
        self._sampled_again[index] = set(self.doubted)
        self._abandoned.append(index)

    def take_abandoned(self) -> list[int]:
        """Return the indices of groups dropped as abandoned since the last call; they must be requested again."""
        abandoned, self._abandoned = self._abandoned, []
        return abandoned

    def take(
        self,
        budget: StepBudget,
        *,
        producing: int,
        bounds: StalenessBounds,
        usable: Callable[[RolloutGroup], bool] = lambda group: True,
        proof_of: Callable[[RolloutGroup], Proof] = lambda group: Proof.COMPLETE,
        must_wait: Callable[[Sequence[int]], bool] | None = None,
    ) -> list[RolloutGroup] | None:
        """Return the next step's groups, in index order and recorded as trained; None if the step cannot begin yet.

        If no group of a full step has a gradient, the run's rule for groups without signal applies: all its groups
        are filtered and the result is None, or the step trains with gradient 0. `usable` returns False for a group if
        the weights that sampled it are unavailable; such a group is stale. A group whose proof is awaited waits, and
        one whose proof is missing is abandoned. If `must_wait` is given, groups train in index order; `must_wait` gets
        the indices of the step's groups, and returns True if others must arrive first.
        """
        fresh = self._fresh(producing=producing, bounds=bounds, usable=usable)
        proofs = {index: proof_of(group) for index, group in fresh.items()}
        for index in [index for index, proof in proofs.items() if proof is Proof.MISSING]:
            log.error("group %d is sampled again: %s has not proven its weights", index, fresh[index].engines)
            del self._waiting[index]
            self._abandoned.append(index)
        fresh = {index: group for index, group in fresh.items() if proofs[index] is Proof.COMPLETE}
        ranked = sorted(fresh.values(), key=lambda g: (0 if must_wait else g.oldest_version, g.index))
        chosen: list[RolloutGroup] = []
        rollouts = tokens = 0
        for group in ranked:
            chosen.append(group)
            rollouts += len(group.rollouts)
            tokens += group.num_tokens
            if rollouts >= budget.rollouts or (budget.tokens is not None and tokens >= budget.tokens):
                break
        else:
            return None
        if must_wait is not None and must_wait([group.index for group in chosen]):
            return None
        for group in chosen:
            self._note_left_out(self._waiting.pop(group.index), group)
        if self._no_signal is NoSignal.FILTER and not any(self._teaches(group) for group in chosen):
            self._filter(chosen, "no group of its step has a learning signal")
            return None
        self.ledger.settle([group.index for group in chosen], GroupOutcome.TRAINED)
        self.solved.note(chosen)
        return sorted(chosen, key=lambda g: g.index)

    def figures(self, *, version: int, k: float) -> dict[str, float]:
        """Return metrics of the groups that wait or were dropped; those of single rollouts only if their age counts."""
        figures: dict[str, float] = {
            "waiting_groups": len(self._waiting),
            "stale_tokens": self.stale_tokens,
            "stale_answers": self.stale_answers,
        }
        if self._scope is StalenessScope.ROLLOUT:
            figures |= {"oldest_fresh": max(0.0, version - k), "stale_rollouts": self.stale_rollouts}
        return figures

    def take_back(self, groups: Sequence[RolloutGroup]) -> None:
        """Let the groups of a step that was not applied wait again, except doubtful ones, which are abandoned."""
        self.ledger.reopen([group.index for group in groups], GroupOutcome.TRAINED)
        for group in groups:
            if self.is_doubtful(group):
                self._abandon_doubtful(group.index)
            else:
                self._waiting[group.index] = group

    def skipped(self, groups: Sequence[RolloutGroup]) -> None:
        """Change the outcome of groups from trained to filtered, because their step was not applied."""
        self.ledger.counts[GroupOutcome.TRAINED] -= len(groups)
        self.ledger.counts[GroupOutcome.FILTERED] += len(groups)
        self._ended(groups, GroupOutcome.FILTERED, "not finite")

    def _note_signal(self, group: RolloutGroup) -> None:
        """Count a group without a gradient or excluded by the recipe's filter; others reset their domain's counts."""
        lacks = not self._teaches(group) or (self._no_signal is NoSignal.FILTER and not self._signal(group))
        if not lacks and not group.refusal:
            self.no_signal.pop(group.domain, None)
            return
        outcomes = {each.verdict.outcome for each in group.rollouts if each.verdict.outcome.is_judgement}
        kinds = {frozenset({Outcome.CORRECT}): "right", frozenset({Outcome.WRONG}): "wrong"}
        kind = kinds.get(frozenset(outcomes), "other") if lacks else "refused"
        before = self.no_signal.get(group.domain, NoSignalGroups())
        self.no_signal[group.domain] = msgspec.structs.replace(before, **{kind: getattr(before, kind) + 1})

    def _filter(self, groups: Sequence[RolloutGroup], why: str) -> None:
        self.ledger.settle([group.index for group in groups], GroupOutcome.FILTERED)
        self.solved.note(groups)
        self._ended(groups, GroupOutcome.FILTERED, why)

    def _fresh(
        self, *, producing: int, bounds: StalenessBounds, usable: Callable[[RolloutGroup], bool]
    ) -> dict[int, RolloutGroup]:
        """Return, by index, the rollouts of each waiting group that are fresh enough to train in this step.

        Groups without such rollouts are dropped as stale; groups whose fresh rollouts have no signal are filtered. The
        choice depends only on the group, the step and the bounds, so a replayed step makes the same choice.
        """
        parts = {
            index: fresh_part(group, producing=producing, bounds=bounds, scope=self._scope)
            for index, group in self._waiting.items()
        }
        fresh = {index: part for index, part in parts.items() if part is not None and usable(part)}
        stale = [index for index in self._waiting if index not in fresh]
        dropped = [self._waiting.pop(index) for index in stale]
        self.stale_tokens += sum(map(_sampled_tokens, dropped))
        self.stale_answers += sum(len(group.rollouts) for group in dropped)
        self.ledger.settle(stale, GroupOutcome.STALE)
        self._ended(dropped, GroupOutcome.STALE, "stale")
        for index in [index for index, part in fresh.items() if part is not self._waiting[index]]:
            if not is_judged(fresh[index]) or (self._no_signal is NoSignal.FILTER and not self._signal(fresh[index])):
                group = self._waiting.pop(index)
                self._note_left_out(group, fresh.pop(index))
                self._filter([group], "its fresh rollouts have no learning signal")
        return fresh

    def _note_left_out(self, group: RolloutGroup, part: RolloutGroup) -> None:
        left_out = len(group.rollouts) - len(part.rollouts)
        self.stale_rollouts += left_out
        self.stale_answers += left_out
        self.stale_tokens += _sampled_tokens(group) - _sampled_tokens(part)


def _sampled_tokens(group: RolloutGroup) -> int:
    return sum(rollout.num_sampled_tokens for rollout in group.rollouts)


def awaited(
    *,
    step: int,
    chosen: Sequence[int],
    waiting: Iterable[int],
    ledger: ConsumedLedger,
    directive: Directive,
) -> list[int]:
    """Return the indices of late groups that the step must await; often none.

    Without waiting, the step that makes version `step` would train the groups `chosen`. Later steps of the same size
    must then train all other requested groups before these become stale. If these steps have too little room, return
    the most urgent groups that have not arrived. `waiting` are the groups that have arrived.
    """
    firsts = [first for first, _ in directive.fresh_until]
    if not firsts:
        return []
    arrived, trained = set(waiting), set(chosen)
    last_step: dict[int, int] = {}
    for index in range(max(ledger.frontier, firsts[0]), directive.issued):
        if index not in trained and not ledger.has(index):
            last_step[index] = directive.fresh_until[bisect.bisect_right(firsts, index) - 1][1]
    due = 0
    for deadline, count in sorted(Counter(last_step.values()).items()):
        due += count
        if due > len(chosen) * max(0, deadline - step):
            late = [index for index, last in last_step.items() if last <= deadline and index not in arrived]
            if late:
                return late
    return []


class OverdueWait:
    """Timer that lets a full step wait for late groups, but for at most `timeout_s` per step."""

    def __init__(self, timeout_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._step = -1
        self._since = 0.0
        self._given_up = False

    def must_wait(self, late: Sequence[int], *, step: int) -> bool:
        if not late:
            return False
        now = self._clock()
        if step != self._step:
            self._step, self._since, self._given_up = step, now, False
        if now - self._since < self._timeout_s:
            return True
        if not self._given_up:
            self._given_up = True
            log.error(
                "step %d no longer waits for the groups of the orders %s, which have not come within %g s "
                "(staleness.overdue_s); look at their actors' logs",
                step,
                ", ".join(map(str, late)),
                self._timeout_s,
            )
        return False
