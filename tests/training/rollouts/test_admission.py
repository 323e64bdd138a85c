"""Admission of rollout groups: each group request gets one outcome, which the ledger records."""

import pytest
from hypothesis import given, strategies as st

from pipelinerl.training.rollouts.admission import (
    ConsumedLedger,
    GroupOutcome,
    Lineage,
    has_signal,
    is_judged,
)
from pipelinerl.types import Outcome, RolloutGroup
from tests.fakes.rollouts import group, rollout


@given(st.permutations(range(30)), st.lists(st.sampled_from(list(GroupOutcome)), min_size=30, max_size=30))
def test_ledger_contains_exactly_the_group_requests_that_have_an_outcome(order, outcomes):
    ledger = ConsumedLedger()
    for seen, (index, outcome) in enumerate(zip(order, outcomes, strict=True)):
        ledger.settle([index], outcome)
        ended = set(order[: seen + 1])
        assert all(ledger.has(i) == (i in ended) for i in range(31))
        assert ConsumedLedger.from_record(ledger.to_record()) == ledger
    assert (ledger.frontier, ledger.beyond) == (30, set())
    assert ledger.counts == {outcome: outcomes.count(outcome) for outcome in GroupOutcome}


@pytest.mark.parametrize("taken", [[2, 3], [3, 9], [9, 5]])
def test_reopened_orders_leave_the_ledger_as_if_they_had_not_ended(taken):
    ledger, untouched = ConsumedLedger(), ConsumedLedger()
    for each in (ledger, untouched):
        each.settle([0, 1, 7], GroupOutcome.FILTERED)
    ledger.settle(taken, GroupOutcome.TRAINED)
    ledger.reopen(taken, GroupOutcome.TRAINED)
    assert ledger == untouched


def test_ledger_rejects_a_second_outcome_of_the_same_group_request():
    ledger = ConsumedLedger()
    ledger.settle([0, 2], GroupOutcome.TRAINED)
    for index in (0, 2):
        with pytest.raises(ValueError, match=f"order {index} ended twice"):
            ledger.settle([index], GroupOutcome.STALE)


@pytest.mark.parametrize(
    ("epoch", "version", "included"),
    [(1, 50, True), (1, 57, False), (2, 50, True), (2, 60, True), (2, 61, False), (3, 99, True), (4, 99, True)],
)
def test_lineage_excludes_weights_abandoned_at_one_restart_even_after_later_restarts(epoch, version, included):
    """Epoch 1 saved version 50 and reached 57; epoch 2 began at 50 and saved 60; epoch 3 began at 60."""
    lineage = Lineage(epoch=3, began_at=60, earlier=((1, 0), (2, 50)))
    assert lineage.includes(group(0, version=version, epoch=epoch)) is included
    assert lineage.epochs == ((1, 0), (2, 50), (3, 60))


def test_group_has_a_learning_signal_only_if_two_rollouts_that_could_be_judged_have_different_rewards():
    assert has_signal(group(0, (0.0, 1.0)))
    assert not has_signal(group(0, (1.0, 1.0)))
    judged, unjudged = rollout(reward=1.0), rollout(reward=0.0, outcome=Outcome.TIMEOUT)
    mixed = RolloutGroup(group_id="g", index=0, domain="d", actor="a", rollouts=(judged, unjudged))
    assert is_judged(mixed)
    assert not has_signal(mixed), "a timeout is not a wrong answer"
