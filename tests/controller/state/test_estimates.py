"""Tests of pass@k against enumerated subsets, and of confidence intervals against published values and by coverage."""

import math
from itertools import combinations

import numpy as np
import pytest

from pipelinerl.controller.state.answer_figures import bootstrap_interval, estimate, pass_at_k, wilson_interval
from pipelinerl.rng import generator


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # z² = 3.841459. For 5 of 10, the centre is (0.5 + z²/20) / (1 + z²/10) = 0.5 and half the width 0.263 (Newcombe
        # 1998's method 3).
        (5, 10, 0.236593, 0.763407),
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
        (1, 1, 0.206549, 1.0),
        (81, 263, 0.2553, 0.3662),  # expected interval from table I of Newcombe 1998
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_interval_matches_published_values(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_answer(n):
    for c in range(n + 1):
        right = [i < c for i in range(n)]
        for k in range(1, n + 1):
            subsets = list(combinations(right, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_is_accurate_for_huge_binomial_coefficients():
    n, c, k = 20_000, 3, 10_000
    # 1 − the probability that none of the three correct samples is drawn
    exact = 1 - (10_000 * 9_999 * 9_998) / (20_000 * 19_999 * 19_998)
    assert pass_at_k(n, c, k) == pytest.approx(exact, rel=1e-10)
    assert pass_at_k(10**6, 1, 1) == pytest.approx(1e-6, rel=1e-9)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1), (0, 0, 1)])
def test_pass_at_k_rejects_impossible_sample_counts(n, c, k):
    with pytest.raises(ValueError, match=f"got n = {n}, c = {c}, k = {k}"):
        pass_at_k(n, c, k)


def test_pass_at_k_is_unbiased():
    """Over draws of n samples, the mean of pass@k is 1 − (1 − p)^k; the plug-in 1 − (1 − c/n)^k is biased."""
    p, n, k, draws = 0.15, 8, 4, 20_000
    counts = generator(0, "unbiased").binomial(n, p, size=draws)
    truth = 1 - (1 - p) ** k
    estimates = np.array([pass_at_k(n, int(c), k) for c in counts])
    error = estimates.std() / math.sqrt(draws)
    assert abs(estimates.mean() - truth) < 4 * error
    assert abs((1 - (1 - counts / n) ** k).mean() - truth) > 10 * error


def test_bootstrap_interval_covers_the_true_mean_in_about_95_percent_of_draws():
    draw = generator(1, "coverage")
    truth, held = 0.6, 0  # the accuracies of problems are drawn from Beta(3, 2), whose mean is 0.6
    for seed in range(300):
        values = draw.binomial(8, draw.beta(3, 2, size=100)) / 8
        low, high = bootstrap_interval(values.tolist(), seed=seed)
        held += low <= truth <= high
        assert 0.05 < high - low < 0.2
    assert 0.91 <= held / 300 <= 0.985


def test_bootstrap_intervals_with_equal_seeds_are_equal():
    values = [i / 97 for i in range(97)]
    assert estimate(values, seed=1) == estimate(values, seed=1) != estimate(values, seed=2)
    assert bootstrap_interval([0.1, 0.9] * 300_000, seed=1) == pytest.approx((0.499, 0.501), abs=5e-4)


def test_wilson_interval_replaces_the_bootstrap_if_all_values_are_equal():
    assert estimate([0.0, 1.0, 1.0], seed=0)[1:] == wilson_interval(2, 3)
    assert estimate([1.0] * 20, seed=0) == (1.0, wilson_interval(20, 20)[0], 1.0) and wilson_interval(20, 20)[0] < 0.9
    mean, low, high = estimate([0.5] * 20, seed=0)
    assert low < 0.35 and high > 0.65 and mean == 0.5
    assert estimate([], seed=0) == (0.0, 0.0, 1.0)
