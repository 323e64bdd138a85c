"""The batcher: its choice does not depend on arrival order, and each rejected group counts once."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from typing import Any

import pytest

from pipelinerl.enums import NoSignal, StalenessScope
from pipelinerl.messages import Directive, NoSignalGroups, TrainerKnobs
from pipelinerl.staleness import StalenessBounds
from pipelinerl.training.replay import RecordedStep
from pipelinerl.training.rollouts.admission import ConsumedLedger, GroupOutcome, Lineage
from pipelinerl.training.rollouts.batcher import Batcher, OverdueWait, StepBudget, awaited
from pipelinerl.types import Outcome, RolloutGroup, Verdict
from tests.fakes.rollouts import group, rollout

BOUNDS = StalenessBounds(1, 4)


def batcher(*, no_signal: NoSignal = NoSignal.FILTER) -> Batcher:
    return Batcher(ledger=ConsumedLedger(), lineage=Lineage(1, 0), no_signal=no_signal)


def test_batcher_waits_until_a_step_is_full_and_trains_each_group_once() -> None:
    waiting = batcher()
    waiting.offer(group(0))
    assert waiting.take(StepBudget(rollouts=4), producing=1, bounds=BOUNDS) is None
    waiting.offer(group(0))
    waiting.offer(group(1))
    assert waiting.waiting == [0, 1], "the copy of one that waits is dropped"
    taken = waiting.take(StepBudget(rollouts=4), producing=1, bounds=BOUNDS)
    assert taken is not None and [g.index for g in taken] == [0, 1]
    waiting.offer(group(1))
    assert (waiting.num_waiting, waiting.ledger.counts[GroupOutcome.TRAINED], waiting.ledger.frontier) == (0, 2, 2)
    assert not waiting.take_abandoned(), "the copy of one that has ended is dropped, and not issued again"


def test_group_refused_by_the_recipes_filter_is_filtered_with_its_reason() -> None:
    heard: list[tuple[list[int], GroupOutcome, str]] = []
    waiting = Batcher(
        ledger=ConsumedLedger(),
        lineage=Lineage(1, 0),
        no_signal=NoSignal.FILTER,
        ended=lambda groups, fate, why: heard.append(([each.index for each in groups], fate, why)),
    )
    waiting.offer(replace(group(0), refusal="one ran on"))
    waiting.offer(replace(group(1, (1.0, 1.0)), refusal="one ran on"))
    waiting.offer(group(2))
    assert heard == [([0], GroupOutcome.FILTERED, "one ran on"), ([1], GroupOutcome.FILTERED, "no signal")]
    assert (waiting.waiting, waiting.ledger.counts[GroupOutcome.FILTERED]) == ([2], 2)


def test_batcher_takes_the_oldest_fresh_groups_regardless_of_arrival_order() -> None:
    groups = [group(index, version=version) for index, version in enumerate([1, 3, 2, 3, 2, 1])]
    chosen = set()
    for seed in range(20):
        waiting = batcher()
        for arrived in random.Random(seed).sample(groups, len(groups)):
            waiting.offer(arrived)
        taken = waiting.take(StepBudget(rollouts=6), producing=4, bounds=BOUNDS)
        assert taken is not None
        chosen.add(tuple(g.index for g in taken))
    assert chosen == {(0, 2, 5)}


def test_group_that_becomes_too_old_while_waiting_is_dropped_as_stale() -> None:
    waiting = batcher()
    old = group(0, version=0)
    waiting.offer(old)
    waiting.offer(group(1, version=2))
    assert waiting.take(StepBudget(rollouts=8), producing=5, bounds=BOUNDS) is None
    assert (waiting.num_waiting, waiting.ledger.counts[GroupOutcome.STALE]) == (1, 1)
    assert waiting.stale_tokens == sum(rollout.num_sampled_tokens for rollout in old.rollouts)


def test_group_that_the_caller_declares_unusable_counts_as_stale() -> None:
    waiting = batcher()
    waiting.offer(group(0, version=3))
    waiting.offer(group(1, version=2))
    taken = waiting.take(
        StepBudget(rollouts=2), producing=4, bounds=BOUNDS, usable=lambda group: group.oldest_version != 3
    )
    assert taken is not None and [each.index for each in taken] == [1]
    assert (waiting.num_waiting, waiting.ledger.counts[GroupOutcome.STALE]) == (0, 1)


def test_group_of_an_abandoned_epoch_is_dropped_and_its_order_reissued() -> None:
    waiting = Batcher(ledger=ConsumedLedger(), lineage=Lineage(epoch=2, began_at=3), no_signal=NoSignal.TRAIN)
    waiting.offer(group(0, version=4, epoch=1))
    assert (waiting.num_waiting, waiting.ledger.has(0)) == (0, False)
    assert (waiting.take_abandoned(), waiting.take_abandoned()) == ([0], []), "told once"
    waiting.offer(group(0, version=3, epoch=2))
    assert waiting.waiting == [0]


@pytest.mark.parametrize(("mode", "filtered", "left"), [(NoSignal.FILTER, 1, 0), (NoSignal.TRAIN, 0, 1)])
def test_groups_without_signal_are_filtered_or_kept_as_configured(mode: NoSignal, filtered: int, left: int) -> None:
    waiting = batcher(no_signal=mode)
    waiting.offer(group(0, (1.0, 1.0)))
    assert (waiting.ledger.counts[GroupOutcome.FILTERED], waiting.num_waiting) == (filtered, left)


@pytest.mark.parametrize("where", ["prompt", "sampled"])
def test_group_with_token_ids_outside_the_vocabulary_is_filtered_and_logged(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = Batcher(ledger=ConsumedLedger(), lineage=Lineage(1, 0), no_signal=NoSignal.FILTER, vocab_size=5)
    foreign = rollout(reward=1.0, **{where: [1, 5]})
    waiting.offer(replace(group(0), rollouts=(rollout(reward=0.0), foreign)))
    assert (waiting.ledger.counts[GroupOutcome.FILTERED], waiting.num_waiting) == (1, 0)
    assert "group 0 of actor actor-0 cannot train and is filtered: token_ids must lie in 0..4, got 5" in caplog.text
    unjudged = replace(foreign, verdict=Verdict(outcome=Outcome.TIMEOUT, reward=0.0))
    waiting.offer(replace(group(1), rollouts=(rollout(reward=0.0), rollout(reward=1.0), unjudged)))
    assert waiting.waiting == [1], "what is not packed is nobody's to compute"


def test_step_of_groups_without_signal_trains_if_they_are_not_filtered() -> None:
    waiting = batcher(no_signal=NoSignal.TRAIN)
    waiting.offer(group(0, (1.0, 1.0)))
    waiting.offer(group(1, (0.0, 0.0)))
    taken = waiting.take(StepBudget(rollouts=4), producing=1, bounds=BOUNDS)
    assert taken is not None and [g.index for g in taken] == [0, 1]
    assert waiting.ledger.counts[GroupOutcome.FILTERED] == 0


@pytest.mark.parametrize("mode", list(NoSignal))
def test_groups_without_signal_are_counted_per_domain_until_a_group_has_signal(mode: NoSignal) -> None:
    waiting = batcher(no_signal=mode)
    rewards = [(1.0, 1.0), (0.0, 0.0), (1.0, 1.0)]
    for index, each in enumerate(rewards):
        waiting.offer(group(index, each))
        waiting.offer(replace(group(10 + index, (0.0, 1.0)), refusal="one ran on", domain="other"))
    assert waiting.no_signal == {"test": NoSignalGroups(right=2, wrong=1), "other": NoSignalGroups(refused=3)}
    waiting.offer(group(20, (0.0, 1.0)))
    assert waiting.no_signal == {"other": NoSignalGroups(refused=3)}


def test_token_budget_can_fill_a_step_before_the_rollout_budget() -> None:
    waiting = batcher()
    for index in range(3):
        waiting.offer(group(index))  # 2 rollouts of 4 tokens each
    taken = waiting.take(StepBudget(rollouts=100, tokens=10), producing=1, bounds=BOUNDS)
    assert taken is not None and [g.index for g in taken] == [0, 1]


def test_groups_of_a_skipped_step_count_as_filtered_instead_of_trained() -> None:
    waiting = batcher()
    for index in (0, 1):
        waiting.offer(group(index))
    taken = waiting.take(StepBudget(rollouts=4), producing=1, bounds=StalenessBounds(1, 4))
    assert taken is not None and waiting.ledger.counts[GroupOutcome.TRAINED] == 2
    waiting.skipped(taken)
    assert (waiting.ledger.counts[GroupOutcome.TRAINED], waiting.ledger.counts[GroupOutcome.FILTERED]) == (0, 2)
    assert waiting.ledger.frontier == 2
    waiting.offer(taken[0])
    assert (waiting.num_waiting, waiting.ledger.counts[GroupOutcome.FILTERED]) == (0, 2), "they have ended"


def test_order_that_the_controller_ends_is_stale_unless_its_group_has_arrived() -> None:
    waiting = batcher()
    waiting.offer(group(0))
    waiting.end([0, 2], GroupOutcome.STALE)
    assert (waiting.waiting, waiting.ledger.has(0), waiting.ledger.has(2)) == ([0], False, True)
    waiting.offer(group(1))
    waiting.offer(group(2))
    taken = waiting.take(StepBudget(rollouts=4), producing=1, bounds=BOUNDS)
    assert taken is not None and [g.index for g in taken] == [0, 1]
    assert (waiting.ledger.counts[GroupOutcome.STALE], waiting.num_waiting, waiting.ledger.frontier) == (1, 0, 3)


def of_ages(index: int, *rewards_and_versions: tuple[float, int]) -> RolloutGroup:
    """Return a group whose rollouts began at different versions, as when some wait for a slot at the engine."""
    rollouts = tuple(rollout(reward=reward, version=version) for reward, version in rewards_and_versions)
    return replace(group(index), rollouts=rollouts)


def by_rollout(no_signal: NoSignal = NoSignal.TRAIN) -> Batcher:
    return Batcher(ledger=ConsumedLedger(), lineage=Lineage(1, 0), no_signal=no_signal, scope=StalenessScope.ROLLOUT)


def test_staleness_per_rollout_trains_only_the_fresh_rollouts_of_a_group() -> None:
    waiting = by_rollout()
    waiting.offer(of_ages(0, (1.0, 0), (0.0, 3), (1.0, 2)))
    waiting.offer(of_ages(1, (1.0, 0), (0.0, 0), (1.0, 2)))
    waiting.offer(group(2, version=2))
    taken = waiting.take(StepBudget(rollouts=4), producing=5, bounds=BOUNDS)
    assert taken is not None
    assert [(each.index, [r.oldest_version for r in each.rollouts]) for each in taken] == [(0, [3, 2]), (2, [2, 2])]
    assert waiting.ledger.counts == {
        GroupOutcome.TRAINED: 2,
        GroupOutcome.FILTERED: 0,
        GroupOutcome.STALE: 1,
        GroupOutcome.FAILED: 0,
    }
    assert (waiting.stale_rollouts, waiting.stale_tokens) == (1, 2 + 6)


def test_staleness_per_rollout_filters_groups_whose_fresh_rollouts_lack_signal() -> None:
    aged = of_ages(0, (1.0, 0), (0.0, 3), (0.0, 2))
    filtering, training = by_rollout(NoSignal.FILTER), by_rollout()
    for waiting in (filtering, training):
        waiting.offer(aged)
        waiting.offer(group(1, version=3))
        waiting.take(StepBudget(rollouts=4), producing=5, bounds=BOUNDS)
    assert (filtering.ledger.counts[GroupOutcome.FILTERED], filtering.waiting) == (1, [1])
    assert (training.ledger.counts[GroupOutcome.TRAINED], training.waiting) == (2, [])
    assert (filtering.stale_rollouts, filtering.stale_tokens) == (1, 2)


def test_staleness_per_group_drops_the_whole_group() -> None:
    waiting = batcher(no_signal=NoSignal.TRAIN)
    waiting.offer(of_ages(0, (1.0, 0), (0.0, 3), (1.0, 3)))
    assert waiting.take(StepBudget(rollouts=2), producing=5, bounds=BOUNDS) is None
    assert waiting.ledger.counts[GroupOutcome.STALE] == 1


@pytest.mark.parametrize("seed", range(30))
def test_replay_of_a_step_reproduces_the_trained_part_of_each_group(seed: int) -> None:
    noise, waiting, bounds = random.Random(seed), by_rollout(), StalenessBounds(1, 3)
    whole = {
        index: of_ages(index, *((float(noise.random() < 0.5), noise.randrange(4, 9)) for _ in range(4)))
        for index in range(12)
    }
    for each in whole.values():
        waiting.offer(each)
    for producing in (8, 9):
        taken = waiting.take(StepBudget(rollouts=8), producing=producing, bounds=bounds)
        recorded = RecordedStep(
            version=producing, lineage=Lineage(1, 0), orders=(), figures={"oldest_fresh": producing - bounds.k}
        )
        for part in taken or []:
            assert recorded.part_of(whole[part.index]) == part
            assert all(bounds.accepts(producing=producing, oldest=each.oldest_version) for each in part.rollouts)
            assert len(part.rollouts) >= 2
    counts = waiting.ledger.counts
    assert sum(counts.values()) + waiting.num_waiting == len(whole)


def directive(fresh_until: list[tuple[int, int]], issued: int) -> Directive:
    return Directive(
        answers="x",
        epoch=1,
        knobs=TrainerKnobs(k=2.0, learning_rate=0.1, rollouts_per_step=4),
        publish_to=[],
        membership=0,
        failed=[],
        checkpoint=False,
        stop=False,
        fresh_until=fresh_until,
        issued=issued,
    )


def late(**changes: Any) -> list[int]:
    """Return the orders for which step 3 waits. A step takes two groups.

    Orders 0 to 3 may train up to step 3, and orders 4 to 7 up to step 4.
    """
    given: dict[str, Any] = {"step": 3, "chosen": [0, 1], "waiting": [0, 1], "ledger": ConsumedLedger()}
    return awaited(directive=directive([(0, 3), (4, 4)], 8), **(given | changes))


def test_step_waits_for_orders_that_would_be_too_old_for_any_later_step() -> None:
    assert late() == [2, 3]
    ended = ConsumedLedger()
    ended.settle([2, 3], GroupOutcome.FAILED)
    assert late(ledger=ended) == [4, 5, 6, 7], "four are due at step 4, which takes two"
    ended.settle([4, 5], GroupOutcome.FILTERED)
    assert late(ledger=ended) == []


def test_step_does_not_wait_for_orders_whose_groups_have_arrived() -> None:
    ended = ConsumedLedger()
    ended.settle([2, 3], GroupOutcome.FAILED)
    assert late(ledger=ended, waiting=[0, 1, 4, 5]) == [6, 7]
    assert late(ledger=ended, waiting=[0, 1, 4, 5, 6, 7]) == [], "it cannot be helped: one of them will be too old"


def test_step_waits_for_no_order_if_the_directive_has_no_deadlines() -> None:
    given: dict[str, Any] = {"step": 3, "chosen": [0], "waiting": [0], "ledger": ConsumedLedger()}
    assert awaited(directive=directive([], 0), **given) == []


@pytest.mark.parametrize("seed", range(200))
def test_step_waits_only_if_the_remaining_orders_cannot_all_train_in_time(seed: int) -> None:
    noise = random.Random(seed)
    issued, step, per = noise.randrange(1, 10), 5, noise.choice([1, 2])
    marks = [(0, noise.randrange(4, 8))]
    marks += [(first, marks[0][1] + noise.randrange(3)) for first in (noise.randrange(1, 6),)]
    here = sorted(noise.sample(range(issued), noise.randrange(issued + 1)))
    chosen = here[:per]
    if len(chosen) < per:
        return
    last = [next(until for first, until in reversed(marks) if first <= index) for index in range(issued)]
    left = sorted(last[index] for index in range(issued) if index not in chosen)
    in_time = all(until >= step + 1 + place // per for place, until in enumerate(left))
    found = awaited(step=step, chosen=chosen, waiting=here, ledger=ConsumedLedger(), directive=directive(marks, issued))
    assert not (found and in_time), "whoever is in time is not waited for"
    assert not set(found) & set(here)
    if not in_time and not found:  # all orders that would be too late have already arrived
        tight = next(until for place, until in enumerate(left) if until < step + 1 + place // per)
        assert all(index in here for index in range(issued) if last[index] <= tight and index not in chosen)


def test_wait_for_overdue_orders_ends_at_its_limit_and_names_them(caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    wait = OverdueWait(60.0, clock=lambda: now[0])
    assert not wait.must_wait([], step=4)
    assert wait.must_wait([7, 9], step=4)
    now[0] = 159.0
    assert wait.must_wait([9], step=4)
    now[0] = 160.0
    with caplog.at_level(logging.ERROR):
        assert not wait.must_wait([9], step=4)
        assert not wait.must_wait([9], step=4)
    (record,) = caplog.records
    assert record.getMessage().startswith("step 4 no longer waits for the groups of the orders 9, which have not come")
    assert wait.must_wait([9], step=5), "the next step has a time of its own"
