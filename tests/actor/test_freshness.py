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


async def ended_at(versions, *, k, begins_after=()):
    """Return the version at which a group is dropped that begins after the versions with these places, or None."""
    freshness, held = Freshness(), Held(asyncio.timeout(None))
    try:
        async with held.scope:
            with freshness.watched(held):
                for place, version in enumerate([None, *versions]):
                    if version is not None:
                        freshness.follow(current=version, k=k)
                        await asyncio.sleep(0)
                    if place in begins_after:
                        held.begin()
    except TimeoutError:
        assert held.scope.expired()
        return freshness.current
    freshness.follow(current=10**6, k=k)  # a finished group is no longer watched
    return None


@pytest.mark.parametrize(
    ("versions", "begins_after", "k", "expected"),
    [
        ([5, 6, 7], [0], 3, None),
        ([5, 6, 7, 8], [0], 3, 8),
        ([5, 5, 5], [0], 1, None),
        ([5, 6], [0], 1, 6),
        ([5, 500], [0], math.inf, None),
        pytest.param([5, 6, 7, 8], [0, 2], 3, None, id="begins-again-on-another-engine"),
        pytest.param([5, 6, 7, 8], [], 1, None, id="waits-for-an-engine"),
        pytest.param([5, 6, 7, 8], [2], 1, 8, id="has-waited-for-an-engine"),
    ],
)
async def test_group_age_counts_from_the_first_version_announced_after_the_group_begins(
    versions, begins_after, k, expected
):
    assert await ended_at(versions, k=k, begins_after=begins_after) == expected


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
