"""Orders that a step waits for, against brute-force feasibility; and the limit of the wait."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest

from pipelinerl.messages import Directive, TrainerKnobs
from pipelinerl.training.rollouts.admission import ConsumedLedger, GroupOutcome
from pipelinerl.training.rollouts.overdue import OverdueWait, awaited


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
    """Return the overdue orders of step 3 at two groups a step; 0 to 3 are fresh until step 3, 4 to 7 until step 4."""
    given: dict[str, Any] = {"step": 3, "chosen": [0, 1], "waiting": [0, 1], "ledger": ConsumedLedger()}
    return awaited(directive=directive([(0, 3), (4, 4)], 8), **(given | changes))


def test_orders_that_can_train_no_later_step_are_awaited() -> None:
    assert late() == [2, 3]
    ended = ConsumedLedger()
    ended.settle([2, 3], GroupOutcome.FAILED)
    assert late(ledger=ended) == [4, 5, 6, 7], "four are due at step 4, which takes two"
    ended.settle([4, 5], GroupOutcome.FILTERED)
    assert late(ledger=ended) == []


def test_arrived_orders_are_not_awaited() -> None:
    ended = ConsumedLedger()
    ended.settle([2, 3], GroupOutcome.FAILED)
    assert late(ledger=ended, waiting=[0, 1, 4, 5]) == [6, 7]
    assert late(ledger=ended, waiting=[0, 1, 4, 5, 6, 7]) == [], "it cannot be helped: one of them will be too old"


def test_without_deadlines_no_order_is_awaited() -> None:
    given: dict[str, Any] = {"step": 3, "chosen": [0], "waiting": [0], "ledger": ConsumedLedger()}
    assert awaited(directive=directive([], 0), **given) == []


@pytest.mark.parametrize("seed", range(200))
def test_step_waits_exactly_if_the_remaining_orders_cannot_train_in_time(seed: int) -> None:
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
    if not in_time and not found:  # then every order that will be late has already arrived
        tight = next(until for place, until in enumerate(left) if until < step + 1 + place // per)
        assert all(index in here for index in range(issued) if last[index] <= tight and index not in chosen)


def test_wait_ends_at_its_limit_and_names_the_orders(caplog: pytest.LogCaptureFixture) -> None:
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
