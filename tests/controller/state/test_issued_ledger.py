"""Tests of the ledger: every issued order has exactly one outcome, despite crashes and repeated reports."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from pipelinerl.controller.state.issued_ledger import IssuedLedger
from pipelinerl.errors import LedgerError
from pipelinerl.messages import ConsumedReport, has_ended
from pipelinerl.training.rollouts.admission import ConsumedLedger, GroupOutcome


def consumed(ledger: ConsumedLedger) -> ConsumedReport:
    """Return the trainer's report of its ledger."""
    counts = {str(fate): n for fate, n in ledger.counts.items()}
    return ConsumedReport(**counts, frontier=ledger.frontier, beyond=sorted(ledger.beyond))


def balanced(account: IssuedLedger) -> bool:
    ledger = account.ledger()
    return ledger["issued"] == sum(count for fate, count in ledger.items() if fate != "issued")


@given(st.lists(st.tuples(st.sampled_from(["issue", "fail", *GroupOutcome]), st.integers(0, 15)), max_size=60))
def test_ledger_balances_after_any_history(history: list[tuple[str, int]]) -> None:
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
def test_unsettled_orders_are_failed_or_stale_and_missing_in_the_trainers_account(
    failed: set[int], outdated: set[int], frontier: int, beyond: set[int]
) -> None:
    report = ConsumedReport(frontier=frontier, beyond=sorted(beyond))
    account = IssuedLedger(cursor=31, failed=failed, outdated=outdated, consumed=report)
    assert account.unsettled == sorted(each for each in failed if not has_ended(each, frontier, beyond))
    assert account.unsettled_stale == sorted(each for each in outdated if not has_ended(each, frontier, beyond))


def test_order_reported_as_failed_but_trained_counts_once() -> None:
    """Another actor completed a second copy of the order, so the trainer's account decides how it ended."""
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


def test_inconsistent_account_is_rejected() -> None:
    account = IssuedLedger()
    account.next_index()
    with pytest.raises(LedgerError, match="issued 1 orders but 2 ended"):
        account.update(ConsumedReport(trained=2, frontier=1))


def test_resumed_ledger_reissues_orders_that_have_not_ended() -> None:
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


def test_groups_of_orders_issued_after_the_checkpoint_move_the_cursor() -> None:
    """The snapshot is older than the groups in the stream. Orders that were trained in between must not be issued
    again.
    """
    resumed, ledger = IssuedLedger(cursor=4), ConsumedLedger()
    ledger.settle([0, 1, 2, 3, 6], GroupOutcome.TRAINED)
    resumed.update(consumed(ledger))
    assert (resumed.cursor, resumed.reissue) == (7, [4, 5])
    assert balanced(resumed)


def test_only_orders_in_flight_can_be_lost() -> None:
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
