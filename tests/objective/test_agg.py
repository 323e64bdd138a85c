"""The weights by which a loss sums its tokens equal hand-computed numbers and have the required sums."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from pipelinerl.objective import agg

LENGTHS = np.array([2, 4, 3, 1])
GROUPS = np.array([0, 0, 9, 9])
ALL = np.ones(4, dtype=bool)

EXPECTED = {
    "trajectory": [1 / 8, 1 / 16, 1 / 12, 1 / 4],
    "group": [1 / 12, 1 / 12, 1 / 8, 1 / 8],
    "batch": [1 / 10] * 4,
    "sequences": [1 / 4] * 4,
}


@pytest.mark.parametrize("kind", agg.KINDS)
def test_aggregation_weights_of_tokens_match_hand_computed_numbers(kind):
    got = agg.KINDS[kind]().token_weights(lengths=LENGTHS, groups=GROUPS, valid=ALL)
    np.testing.assert_allclose(got, EXPECTED[kind])


def test_sequences_aggregation_divides_by_the_maximum_length():
    got = agg.Sequences(length=10).token_weights(lengths=LENGTHS, groups=GROUPS, valid=ALL)
    np.testing.assert_allclose(got, 1 / 40)


@pytest.mark.parametrize("kind", agg.KINDS)
@given(data=st.data())
def test_excluded_rollouts_have_aggregation_weight_0_and_do_not_change_other_rollouts_weights(kind, data):
    size = data.draw(st.integers(0, 12))
    lengths = np.array(data.draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)), dtype=int)
    groups = np.array(data.draw(st.lists(st.integers(-2, 3), min_size=size, max_size=size)), dtype=int)
    valid = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)), dtype=bool)
    rule = agg.KINDS[kind]()
    weights = rule.token_weights(lengths=lengths, groups=groups, valid=valid)
    counted = valid & (lengths > 0)
    assert (weights[~counted] == 0).all()
    alone = rule.token_weights(lengths=lengths[counted], groups=groups[counted], valid=valid[counted])
    np.testing.assert_allclose(weights[counted], alone)
    if counted.any() and kind != "sequences":
        np.testing.assert_allclose((weights * lengths).sum(), 1.0)
