"""Tests of the ledger: every requested group has exactly one outcome, despite crashes and repeated reports."""

import random

import pytest
from hypothesis import given, strategies as st

from pipelinerl.controller.state.issued_ledger import FilteredShare, IssuedLedger
from pipelinerl.errors import LedgerError
from pipelinerl.messages import ConsumedReport, has_ended
from pipelinerl.staleness import StalenessBounds
from pipelinerl.training.rollouts.admission import ConsumedLedger, GroupOutcome


def consumed(ledger):
    counts = {str(outcome): n for outcome, n in ledger.counts.items()}
    return ConsumedReport(**counts, frontier=ledger.frontier, beyond=sorted(ledger.beyond))


def balanced(account):
    ledger = account.ledger()
    return ledger["issued"] == sum(count for outcome, count in ledger.items() if outcome != "issued")


@given(st.lists(st.tuples(st.sampled_from(["issue", "fail", *GroupOutcome]), st.integers(0, 15)), max_size=60))
def test_number_of_issued_groups_is_the_sum_of_ended_groups_and_groups_in_flight_after_any_history(history):
    account, ledger = IssuedLedger(), ConsumedLedger()
    for what, number in history:
        if what == "issue":
            account.next_index()
        elif what == "fail":
            account.fail(number)
        elif number < account.cursor and not ledger.has(number):
            ledger.settle([number], GroupOutcome(what))
            account.update(consumed(ledger))
        assert balanced(account) and account.in_flight >= 0
        assert account.ledger()["issued"] == account.cursor


@given(st.sets(st.integers(0, 30)), st.sets(st.integers(0, 30)), st.integers(0, 30), st.sets(st.integers(0, 30)))
def test_failed_and_stale_groups_stay_unsettled_until_the_trainer_has_counted_them(failed, outdated, frontier, beyond):
    report = ConsumedReport(frontier=frontier, beyond=sorted(beyond))
    account = IssuedLedger(cursor=31, failed=failed, outdated=outdated, consumed=report)
    assert account.unsettled == sorted(each for each in failed if not has_ended(each, frontier, beyond))
    assert account.unsettled_stale == sorted(each for each in outdated if not has_ended(each, frontier, beyond))


def test_group_reported_as_failed_and_then_trained_counts_only_as_trained():
    """One actor reported a failure, and another completed a second copy of the group; the trainer's report decides."""
    account, ledger = IssuedLedger(), ConsumedLedger()
    for _ in range(3):
        account.next_index()
    account.fail(1)
    account.fail(1)
    assert account.ledger() | {"failed": 1, "in_flight": 2} == account.ledger()
    ledger.settle([0, 1], GroupOutcome.TRAINED)
    account.update(consumed(ledger))
    assert account.ledger() == {"issued": 3, "trained": 2, "filtered": 0, "stale": 0, "failed": 0, "in_flight": 1}
    account.fail(1)
    assert account.unsettled == []


def test_ledger_rejects_a_trainer_report_with_more_ended_groups_than_were_issued():
    account = IssuedLedger()
    account.next_index()
    with pytest.raises(LedgerError, match="issued 1 orders but 2 ended"):
        account.update(ConsumedReport(trained=2, frontier=1))


def test_resumed_ledger_reissues_the_groups_that_had_not_ended():
    account, ledger = IssuedLedger(), ConsumedLedger()
    for _ in range(8):
        account.next_index()
    ledger.settle([0, 1, 4], GroupOutcome.TRAINED)
    account.update(consumed(ledger))
    account.fail(3)
    resumed = IssuedLedger.resume(account.to_record(), consumed(ledger))
    assert resumed.reissue == [2, 5, 6, 7]
    assert (resumed.in_flight, resumed.unsettled) == (0, [3])
    assert [resumed.next_index() for _ in range(6)] == [2, 5, 6, 7, 8, 9]
    assert balanced(resumed)


def test_ledger_reissues_only_those_lost_groups_that_were_in_flight():
    account, ledger = IssuedLedger(), ConsumedLedger()
    for _ in range(6):
        account.next_index()
    ledger.settle([0], GroupOutcome.STALE)
    account.update(consumed(ledger))
    account.fail(1)
    assert account.lost([0, 1, 2, 4, 99]) == [2, 4]
    assert account.lost([2, 4]) == []
    assert (account.reissue, account.in_flight) == ([2, 4], 2)
    assert balanced(account)


def test_estimate_of_the_share_of_filtered_groups_converges_and_follows_changes():
    share = FilteredShare()
    share.note_step(trained=1, filtered=1)
    assert 0 < share.share < 0.2, "one step is no evidence yet"
    for _ in range(100):
        share.note_step(trained=8, filtered=24)
    assert share.share == pytest.approx(0.75, abs=0.05)
    for _ in range(100):
        share.note_step(trained=8, filtered=0)
    assert share.share < 0.05


def test_number_of_extra_groups_requested_for_expected_filtering_is_bounded():
    share = FilteredShare(trained=1.0, filtered=10_000.0)
    assert share.expected(30, waiting=0, most=3.0) == 10
    assert share.expected(30, waiting=0, most=1.0) == 30, "1 compensates for nothing"
    assert share.expected(30, waiting=9, most=3.0) == 16, "what waits has passed"
    assert share.expected(30, waiting=90, most=3.0) == 30


def ticks(most, *, filtered, seed, steps=200):
    """Simulate `steps` steps; return the clock ticks that they take, and the number of stale groups.

    Sampling a group takes three ticks, and a step takes one. `most` limits the extra requests.
    """
    noise, share, bounds, groups_per_step = random.Random(seed), FilteredShare(), StalenessBounds(1, 4), 4
    version = tick = stale = dropped = waiting = 0
    out = []  # for each group in flight: the tick at which it ends, and its version
    ready = []
    while version < steps:
        tick += 1
        ended = [began for at, began in out if at <= tick]
        out = [each for each in out if each[0] > tick]
        kept = [began for began in ended if noise.random() >= filtered]
        dropped += len(ended) - len(kept)
        fresh = [began for began in [*ready, *kept] if bounds.accepts(producing=version + 1, oldest=began)]
        stale += len(ready) + len(kept) - len(fresh)
        ready = sorted(fresh, reverse=True)
        if len(ready) >= groups_per_step:
            ready, version = ready[groups_per_step:], version + 1
            waiting = len(ready)
            share.note_step(trained=groups_per_step, filtered=dropped)
            dropped = 0
        while bounds.may_issue(
            current=version,
            loaded=version,
            queued=share.expected(len(out) + len(ready), waiting=waiting, most=most),
            per_step=groups_per_step,
        ):
            out.append((tick + 3, version))
    return tick, stale


@pytest.mark.parametrize("seed", range(3))
def test_requesting_extra_groups_halves_the_trainers_waiting_time_if_most_groups_are_filtered(seed):
    (without, _), (compensated, stale) = (ticks(most, filtered=0.75, seed=seed) for most in (1.0, 3.0))
    assert compensated < 0.5 * without
    assert stale < 0.25 * 4 * 200, "and most of what is sampled for it is trained"
    assert ticks(4.0, filtered=0.0, seed=seed) == ticks(1.0, filtered=0.0, seed=seed)
