"""The staleness bounds j (when engines load new weights) and k (which rollouts the trainer accepts) of RLAX §3.1."""

import math

import pytest
from hypothesis import given, strategies as st

from pipelinerl.errors import RecipeError
from pipelinerl.staleness import MODES, StalenessBounds


def test_rollout_is_accepted_if_its_age_in_versions_is_at_most_the_staleness_bound_k():
    bounds = StalenessBounds(1, 2)
    assert [bounds.accepts(producing=10, oldest=oldest) for oldest in (10, 9, 8, 7)] == [True, True, True, False]
    assert StalenessBounds(1, math.inf).accepts(producing=10**9, oldest=0)


def test_on_policy_staleness_bounds_allow_requests_for_only_one_step_at_a_time():
    bounds = MODES["on_policy"]
    issued = [bounds.may_issue(current=5, loaded=5, queued=n, per_step=4) for n in range(6)]
    assert issued == [True] * 4 + [False] * 2
    assert not bounds.may_issue(current=6, loaded=5, queued=0, per_step=4)


@given(st.integers(1, 5), st.integers(0, 20), st.integers(0, 9), st.integers(0, 9), st.integers(1, 6))
def test_rollouts_requested_within_the_staleness_bounds_are_accepted_at_the_step_that_trains_them(
    j, slack, current, age, step
):
    """Every rollout that `may_issue` allows is not too old at the first step that has room for it."""
    bounds, loaded = StalenessBounds(j, j + slack), max(0, current - age)
    queued = 0
    while queued < 200 and bounds.may_issue(current=current, loaded=loaded, queued=queued, per_step=step):
        assert bounds.accepts(producing=current + 1 + queued // step, oldest=loaded)
        queued += 1
    assert queued == 0 or queued % step == 0, "a step is issued whole or not at all"


@given(st.integers(0, 20), st.integers(8, 30), st.lists(st.integers(1, 8), min_size=400, max_size=400))
def test_groups_of_any_size_requested_within_the_staleness_bounds_are_accepted_at_their_step(slack, step, sizes):
    """The controller issues prompts for whole groups, in order, until a step has enough rollouts."""
    bounds, queued, issued = StalenessBounds(1, 1 + slack), 0, 0
    while issued < len(sizes) and bounds.may_issue(current=0, loaded=0, queued=queued, per_step=step):
        queued, issued = queued + sizes[issued], issued + 1
    rest, version = sizes[:issued], 0
    while rest:
        version, taken = version + 1, 0
        while rest and taken < step:
            taken += rest.pop(0)
        assert bounds.accepts(producing=version, oldest=0)
        assert taken >= step or version > 1 or issued == len(sizes), "the first step, at least, is issued whole"


@pytest.mark.parametrize(
    ("j", "k", "sentence"),
    [
        (0, 1, "staleness.j must be at least 1, got 0"),
        (2, 1, "staleness.k must be at least j = 2, got 1"),
        (1, 1.5, "staleness.k must be a whole number or inf, got 1.5"),
        (1, math.nan, "staleness.k must be a whole number or inf, got nan"),
        (1, -math.inf, "staleness.k must be at least j = 1, got -inf"),
    ],
)
def test_impossible_staleness_bounds_are_rejected(j, k, sentence):
    with pytest.raises(RecipeError, match=sentence):
        StalenessBounds(j, k)
