"""A mixture of domains keeps quotas exactly within each step; its problems depend only on index and arguments."""

from collections import Counter

import pytest

from pipelinerl.data.mixture import Domain, Mixture
from pipelinerl.errors import RecipeError
from pipelinerl.types import Problem, Quota


class Numbered:
    """A source whose problems consist only of their index."""

    def problem(self, index):
        return Problem(problem_id=str(index), domain="", messages=(), ground_truth="")


def mixture(weights, *, seed=0):
    return Mixture([Domain(name=name, weight=weight, source=Numbered()) for name, weight in weights.items()], seed=seed)


def names(made, count, quota, weights=None):
    return [made.domain(index, weights, quota).name for index in range(count)]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
@pytest.mark.parametrize("size", [1, 3, 8, 32, 250])
@pytest.mark.parametrize("weights", [(1.0, 1.0, 2.0), (0.7, 0.25, 0.05), (1.0, 2.0, 3.0)])
def test_domain_shares_are_kept_over_thousands_of_problems_and_within_each_step(weights, size, seed):
    """Each domain's share is within 1 % over each 1,000 problems, and off by less than one problem in each step."""
    by_name = dict(zip("abc", weights, strict=True))
    drawn = names(mixture(by_name, seed=seed), 10_000, Quota(0, size))
    for start in range(0, 10_000, 1000):
        counts = Counter(drawn[start : start + 1000])
        for name, weight in by_name.items():
            assert abs(counts[name] / 1000 - weight / sum(weights)) <= 0.01
    for start in range(0, 10_000 - size + 1, size):
        counts = Counter(drawn[start : start + size])
        for name, weight in by_name.items():
            share = size * weight / sum(weights)
            assert abs(counts[name] - share) < 1
            assert not share.is_integer() or counts[name] == share, (
                "a share that is a whole number must be kept exactly"
            )


def test_order_of_domains_within_a_step_is_shuffled_by_seed():
    equal = {"a": 1.0, "b": 1.0}
    drawn = names(mixture(equal), 4000, Quota(0, 8))
    assert drawn == names(mixture(equal), 4000, Quota(0, 8))
    assert drawn != names(mixture(equal, seed=1), 4000, Quota(0, 8))
    made = mixture(equal)
    assert [made.domain(index, None, Quota(0, 8)).name for index in reversed(range(4000))] == drawn[::-1]
    firsts = Counter(drawn[start] for start in range(0, 4000, 8))
    assert 180 < firsts["a"] < 320, "each domain must be first in about half of the steps"


def test_domain_weights_given_with_a_request_apply_and_zero_weight_disables_a_domain():
    made, quota = mixture({"a": 1.0, "b": 1.0, "c": 1.0}), Quota(40, 4)
    assert Counter(made.domain(i, {"a": 3.0, "b": 0.0, "c": 1.0}, quota).name for i in range(40, 80)) == {
        "a": 30,
        "c": 10,
    }
    for off in ("a", "b", "c"):
        weights = {name: 0.0 if name == off else 0.1 for name in "abc"}
        assert off not in {made.domain(i, weights, quota).name for i in range(40, 3000)}


@pytest.mark.parametrize("weights", [(), (0.0,), (1.0, -1.0), (float("nan"),), (float("inf"), 1.0)])
def test_domain_weights_must_be_positive_and_finite(weights):
    with pytest.raises(RecipeError, match="positive finite weights"):
        mixture(dict(zip("ab", weights, strict=False)))
