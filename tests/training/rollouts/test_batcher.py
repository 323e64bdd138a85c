"""The batcher chooses the groups of each step, whatever their arrival order, and counts every rejected group once."""

import logging
import random
from dataclasses import replace

import pytest

from pipelinerl.enums import NoSignal, StalenessScope
from pipelinerl.messages import NoSignalGroups
from pipelinerl.plugins.replay.recorded_run import RecordedStep
from pipelinerl.staleness import StalenessBounds
from pipelinerl.training.rollouts.admission import ConsumedLedger, GroupOutcome, Lineage
from pipelinerl.training.rollouts.batcher import Batcher, OverdueWait, StepBudget, awaited
from pipelinerl.types import Outcome, Verdict
from tests.fakes.directives import directive
from tests.fakes.rollouts import group, rollout

BOUNDS = StalenessBounds(1, 4)


def batcher(*, no_signal=NoSignal.FILTER):
    return Batcher(ledger=ConsumedLedger(), lineage=Lineage(1, 0), no_signal=no_signal)


def indices(taken):
    return None if taken is None else [each.index for each in taken]


def offered(waiting, *groups):
    for each in groups:
        waiting.offer(each)
    return waiting


def test_batcher_waits_until_it_has_enough_rollouts_for_a_step_and_uses_each_group_once():
    waiting = offered(batcher(), group(0))
    assert waiting.take(StepBudget(rollouts=4), producing=1, bounds=BOUNDS) is None
    waiting.offer(group(0))
    waiting.offer(group(1))
    assert waiting.waiting == [0, 1], "the copy of one that waits is dropped"
    taken = waiting.take(StepBudget(rollouts=4), producing=1, bounds=BOUNDS)
    assert indices(taken) == [0, 1]
    waiting.offer(group(1))
    assert (len(waiting.waiting), waiting.ledger.counts[GroupOutcome.TRAINED], waiting.ledger.frontier) == (0, 2, 2)
    assert not waiting.take_abandoned(), "the copy of one that has ended is dropped, and not issued again"


def test_group_that_the_recipes_filter_rejected_is_counted_as_filtered_with_the_filters_reason():
    endings = []
    waiting = Batcher(
        ledger=ConsumedLedger(),
        lineage=Lineage(1, 0),
        no_signal=NoSignal.FILTER,
        ended=lambda groups, outcome, why: endings.append(([each.index for each in groups], outcome, why)),
    )
    waiting.offer(replace(group(0), refusal="one ran on"))
    waiting.offer(replace(group(1, (1.0, 1.0)), refusal="one ran on"))
    waiting.offer(group(2))
    assert endings == [([0], GroupOutcome.FILTERED, "one ran on"), ([1], GroupOutcome.FILTERED, "no signal")]
    assert (waiting.waiting, waiting.ledger.counts[GroupOutcome.FILTERED]) == ([2], 2)


def test_batcher_takes_the_oldest_groups_that_are_not_stale_in_whatever_order_they_arrived():
    groups = [group(index, version=version) for index, version in enumerate([1, 3, 2, 3, 2, 1])]
    for seed in range(20):
        waiting = offered(batcher(), *random.Random(seed).sample(groups, len(groups)))
        taken = waiting.take(StepBudget(rollouts=6), producing=4, bounds=BOUNDS)
        assert indices(taken) == [0, 2, 5]


def test_group_that_becomes_too_old_while_waiting_is_dropped_as_stale():
    waiting = batcher()
    old = group(0, version=0)
    waiting.offer(old)
    waiting.offer(group(1, version=2))
    assert waiting.take(StepBudget(rollouts=8), producing=5, bounds=BOUNDS) is None
    assert (len(waiting.waiting), waiting.ledger.counts[GroupOutcome.STALE]) == (1, 1)
    assert waiting.stale_tokens == sum(rollout.num_sampled_tokens for rollout in old.rollouts)


def test_group_that_the_callers_usable_function_rejects_counts_as_stale():
    waiting = offered(batcher(), group(0, version=3), group(1, version=2))
    taken = waiting.take(
        StepBudget(rollouts=2), producing=4, bounds=BOUNDS, usable=lambda group: group.oldest_version != 3
    )
    assert indices(taken) == [1]
    assert (len(waiting.waiting), waiting.ledger.counts[GroupOutcome.STALE]) == (0, 1)


def test_group_sampled_by_abandoned_weights_is_dropped_and_listed_once_for_a_new_request():
    waiting = Batcher(ledger=ConsumedLedger(), lineage=Lineage(epoch=2, began_at=3), no_signal=NoSignal.TRAIN)
    waiting.offer(group(0, version=4, epoch=1))
    assert (len(waiting.waiting), waiting.ledger.has(0)) == (0, False)
    assert (waiting.take_abandoned(), waiting.take_abandoned()) == ([0], []), "reported once"
    waiting.offer(group(0, version=3, epoch=2))
    assert waiting.waiting == [0]


@pytest.mark.parametrize("mode", list(NoSignal))
def test_groups_with_equal_rewards_are_filtered_or_train_as_configured(mode):
    waiting = offered(batcher(no_signal=mode), group(0, (1.0, 1.0)), group(1, (0.0, 0.0)))
    taken = waiting.take(StepBudget(rollouts=4), producing=1, bounds=BOUNDS)
    assert indices(taken) == ([0, 1] if mode is NoSignal.TRAIN else None)
    assert waiting.ledger.counts[GroupOutcome.FILTERED] == (0 if mode is NoSignal.TRAIN else 2)


@pytest.mark.parametrize("where", ["prompt", "sampled"])
def test_group_with_token_ids_outside_the_vocabulary_is_filtered_and_logged(where, caplog):
    waiting = Batcher(ledger=ConsumedLedger(), lineage=Lineage(1, 0), no_signal=NoSignal.FILTER, vocab_size=5)
    foreign = rollout(reward=1.0, **{where: [1, 5]})
    waiting.offer(replace(group(0), rollouts=(rollout(reward=0.0), foreign)))
    assert (waiting.ledger.counts[GroupOutcome.FILTERED], len(waiting.waiting)) == (1, 0)
    assert "group 0 of actor actor-0 cannot train and is filtered: token_ids must lie in 0..4, got 5" in caplog.text
    unjudged = replace(foreign, verdict=Verdict(outcome=Outcome.TIMEOUT, reward=0.0))
    waiting.offer(replace(group(1), rollouts=(rollout(reward=0.0), rollout(reward=1.0), unjudged)))
    assert waiting.waiting == [1], "a group that is not packed is not computed"


@pytest.mark.parametrize("mode", list(NoSignal))
def test_count_of_groups_without_learning_signal_is_reset_by_a_group_of_the_domain_with_a_signal(mode):
    waiting = batcher(no_signal=mode)
    rewards = [(1.0, 1.0), (0.0, 0.0), (1.0, 1.0)]
    for index, each in enumerate(rewards):
        waiting.offer(group(index, each))
        waiting.offer(replace(group(10 + index, (0.0, 1.0)), refusal="one ran on", domain="other"))
    assert waiting.no_signal == {"test": NoSignalGroups(right=2, wrong=1), "other": NoSignalGroups(refused=3)}
    waiting.offer(group(20, (0.0, 1.0)))
    assert waiting.no_signal == {"other": NoSignalGroups(refused=3)}


def test_step_is_full_when_its_token_budget_is_reached_before_its_rollout_budget():
    waiting = offered(batcher(), *map(group, range(3)))  # each group has 2 rollouts of 4 tokens
    taken = waiting.take(StepBudget(rollouts=100, tokens=10), producing=1, bounds=BOUNDS)
    assert indices(taken) == [0, 1]


def test_skipping_a_step_changes_the_outcome_of_its_groups_from_trained_to_filtered():
    waiting = offered(batcher(), group(0), group(1))
    taken = waiting.take(StepBudget(rollouts=4), producing=1, bounds=StalenessBounds(1, 4))
    assert taken is not None and waiting.ledger.counts[GroupOutcome.TRAINED] == 2
    waiting.skipped(taken)
    assert (waiting.ledger.counts[GroupOutcome.TRAINED], waiting.ledger.counts[GroupOutcome.FILTERED]) == (0, 2)
    assert waiting.ledger.frontier == 2
    waiting.offer(taken[0])
    assert (len(waiting.waiting), waiting.ledger.counts[GroupOutcome.FILTERED]) == (0, 2), "they have ended"


def test_group_that_arrives_after_the_controller_ended_its_request_counts_as_stale():
    waiting = offered(batcher(), group(0))
    waiting.end([0, 2], GroupOutcome.STALE)
    assert (waiting.waiting, waiting.ledger.has(0), waiting.ledger.has(2)) == ([0], False, True)
    waiting.offer(group(1))
    waiting.offer(group(2))
    taken = waiting.take(StepBudget(rollouts=4), producing=1, bounds=BOUNDS)
    assert indices(taken) == [0, 1]
    assert (waiting.ledger.counts[GroupOutcome.STALE], len(waiting.waiting), waiting.ledger.frontier) == (1, 0, 3)


def of_ages(index, *rewards_and_versions):
    """Return a group whose rollouts began at different versions, as if some had waited longer for a free engine."""
    rollouts = tuple(rollout(reward=reward, version=version) for reward, version in rewards_and_versions)
    return replace(group(index), rollouts=rollouts)


def by_rollout(no_signal=NoSignal.TRAIN):
    return Batcher(ledger=ConsumedLedger(), lineage=Lineage(1, 0), no_signal=no_signal, scope=StalenessScope.ROLLOUT)


def test_staleness_per_rollout_drops_only_the_stale_rollouts_of_a_group():
    aged = of_ages(0, (1.0, 0), (0.0, 3), (1.0, 2)), of_ages(1, (1.0, 0), (0.0, 0), (1.0, 2))
    waiting = offered(by_rollout(), *aged, group(2, version=2))
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


def test_staleness_per_rollout_filters_groups_whose_remaining_rollouts_have_equal_rewards():
    aged = of_ages(0, (1.0, 0), (0.0, 3), (0.0, 2))
    filtering, training = by_rollout(NoSignal.FILTER), by_rollout()
    for waiting in (filtering, training):
        waiting.offer(aged)
        waiting.offer(group(1, version=3))
        waiting.take(StepBudget(rollouts=4), producing=5, bounds=BOUNDS)
    assert (filtering.ledger.counts[GroupOutcome.FILTERED], filtering.waiting) == (1, [1])
    assert (training.ledger.counts[GroupOutcome.TRAINED], training.waiting) == (2, [])
    assert (filtering.stale_rollouts, filtering.stale_tokens) == (1, 2)


def test_staleness_per_group_drops_a_whole_group_if_one_rollout_is_stale():
    waiting = offered(batcher(no_signal=NoSignal.TRAIN), of_ages(0, (1.0, 0), (0.0, 3), (1.0, 3)))
    assert waiting.take(StepBudget(rollouts=2), producing=5, bounds=BOUNDS) is None
    assert waiting.ledger.counts[GroupOutcome.STALE] == 1


@pytest.mark.parametrize("seed", range(30))
def test_replayed_step_selects_the_same_fresh_rollouts_of_each_group_as_the_original_step(seed):
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
    assert sum(counts.values()) + len(waiting.waiting) == len(whole)


def late(**changes):
    """Return the indices of the groups for which step 3 waits; each step trains on two groups.

    Groups 0 to 3 may train at step 3 at the latest, groups 4 to 7 at step 4.
    """
    given = {"step": 3, "chosen": [0, 1], "waiting": [0, 1], "ledger": ConsumedLedger()}
    return awaited(**{"directive": directive(fresh_until=[(0, 3), (4, 4)], issued=8)} | given | changes)


def test_step_waits_for_missing_groups_that_would_be_too_old_for_every_later_step():
    assert late() == [2, 3]
    ended = ConsumedLedger()
    ended.settle([2, 3], GroupOutcome.FAILED)
    assert late(ledger=ended) == [4, 5, 6, 7], "four are due at step 4, which takes two"
    ended.settle([4, 5], GroupOutcome.FILTERED)
    assert late(ledger=ended) == []
    assert late(chosen=[0], waiting=[0], directive=directive(fresh_until=[], issued=0)) == [], "no deadlines"


@pytest.mark.parametrize("seed", range(200))
def test_step_waits_only_if_starting_now_would_make_some_group_too_old_to_train(seed):
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
    overdue = late(step=step, chosen=chosen, waiting=here, directive=directive(fresh_until=marks, issued=issued))
    assert not (overdue and in_time), "a step does not wait for groups that are in time"
    assert not set(overdue) & set(here)
    if not in_time and not overdue:  # then every group that would be too late must have arrived already
        tight = next(until for place, until in enumerate(left) if until < step + 1 + place // per)
        assert all(index in here for index in range(issued) if last[index] <= tight and index not in chosen)


def test_step_stops_waiting_for_overdue_groups_at_a_time_limit_and_logs_which_are_missing(caplog):
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
