"""Tests of `Freshness`, which drops exactly the groups that are too stale for every future step."""

import asyncio
import math

import pytest
from hypothesis import given, strategies as st

from pipelinerl.actor.freshness import Freshness, Held, can_be_fresh


@given(st.integers(0, 50), st.integers(0, 50), st.one_of(st.integers(1, 20), st.just(math.inf)))
def test_group_counts_as_fresh_exactly_while_staleness_bound_k_lets_the_next_step_accept_it(began, age, k):
    """With staleness bound k, the step after version v accepts a group if (v + 1) − oldest ≤ k (RLAX §3.1)."""
    current = began + age
    assert can_be_fresh(began, current=current, k=k) == (age + 1 <= k)
    if not can_be_fresh(began, current=current, k=k):
        assert not can_be_fresh(began, current=current + 1, k=k)


async def ended_at(freshness, versions, *, k, begin_again_after=-1, waits=False):
    """Return the version at which `freshness` drops a group that begins now; None if it never drops that group."""
    held = Held(asyncio.timeout(None))
    try:
        async with held.scope:
            with freshness.watched(held):
                if not waits:
                    held.begin()
                for number, version in enumerate(versions):
                    freshness.follow(current=version, k=k)
                    await asyncio.sleep(0)
                    if number == begin_again_after:
                        held.begin()
    except TimeoutError:
        assert held.scope.expired()
        return freshness.current
    return None


@pytest.mark.parametrize(
    ("versions", "k", "expected"),
    [
        ([5, 6, 7], 3, None),
        ([5, 6, 7, 8], 3, 8),
        ([5, 5, 5], 1, None),
        ([5, 6], 1, 6),
        ([5, 500], math.inf, None),
    ],
)
async def test_group_age_counts_from_the_first_version_announced_after_the_group_begins(versions, k, expected):
    assert await ended_at(Freshness(), versions, k=k) == expected


async def test_age_of_a_retried_group_counts_from_the_retry():
    assert await ended_at(Freshness(), [5, 6, 7, 8], k=3, begin_again_after=1) is None


async def test_dropped_group_reports_the_version_of_its_first_attempt_even_if_a_retry_just_began():
    freshness, held = Freshness(), Held(asyncio.timeout(None))
    with pytest.raises(TimeoutError):
        async with held.scope:
            with freshness.watched(held):
                held.begin()
                freshness.follow(current=5, k=1)
                freshness.follow(current=6, k=1)
                held.begin()  # the group is retried on another engine before its timeout is raised
                await asyncio.sleep(1)
    assert held.began is None and held.given_up == 5


async def test_age_of_a_group_does_not_count_the_wait_for_an_engine():
    assert await ended_at(Freshness(), [5, 6, 7, 8], k=1, waits=True) is None
    assert await ended_at(Freshness(), [5, 6, 7, 8], k=1, waits=True, begin_again_after=1) == 8


async def test_age_of_a_finished_group_is_no_longer_watched():
    freshness = Freshness()
    assert await ended_at(freshness, [1], k=1) is None
    freshness.follow(current=9, k=1)
