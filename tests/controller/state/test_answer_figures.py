"""Tests of evaluation metrics, against values computed manually or by enumeration, and of confidence intervals."""

import itertools
from itertools import combinations
from statistics import fmean

import pytest

from pipelinerl.controller.state.answer_figures import (
    MOST_TAGS,
    bootstrap_interval,
    estimate,
    figures_by_domain,
    figures_by_tag,
    figures_of,
    majority_right,
    pass_at_k,
    wilson_interval,
)
from pipelinerl.rng import generator
from tests.controller.world import answered


def done(answers, right, *, domain="math", tags=(), lengths=(), truncated=0, unjudged=()):
    """Return a result with one letter of `answers` per sample (`-` is empty); letters in `right` are correct."""
    texts = ["" if letter == "-" else letter for letter in answers]
    judged = [place for place in range(len(texts)) if place not in unjudged]
    is_right = [place in judged and letter in right for place, letter in enumerate(texts)]
    figures = {"truncated": truncated, "lengths": list(lengths or [1] * len(texts)), "right": is_right}
    figures |= {"domain": domain, "tags": list(tags), "answers": texts, "unjudged": list(unjudged)}
    return answered("eval-1-1-000000", 0, correct=sum(is_right), judged=len(judged), versions=(1, 1), **figures)


@pytest.mark.parametrize(
    ("answers", "right", "expected"),
    [
        ("aab", "a", True),
        ("abb", "a", False),
        ("abba", "a", True),  # in a tie, the answer that comes first wins
        ("baab", "a", False),
        ("--a", "a", True),  # empty answers do not vote
        ("---", "a", False),
        ("", "a", False),
    ],
)
def test_majority_vote_is_correct_if_the_most_frequent_answer_is_correct(answers, right, expected):
    texts = ["" if letter == "-" else letter for letter in answers]
    assert majority_right(texts, [letter in right for letter in texts]) is expected


def test_maj_at_k_averaged_over_permutations_of_samples_equals_its_mean_over_draws_of_k_samples():
    """The mean of the metric over all orders of five samples equals the mean over all draws of k = 3 samples."""
    samples, k = "aabbc", 3
    of_orders = [
        figures_of([done("".join(order), "a")], pass_at=(k,), seed=0).majority_at[0].value
        for order in itertools.permutations(samples)
    ]
    of_draws = [majority_right(draw, [letter == "a" for letter in draw]) for draw in itertools.permutations(samples, k)]
    assert fmean(of_orders) == pytest.approx(fmean(of_draws))
    assert 0 < fmean(of_draws) < 1


def test_length_and_truncation_metrics_cover_all_samples_of_all_problems():
    answers = [
        done("aaab", "a", lengths=(1, 2, 3, 4), truncated=1),
        done("bbba", "a", lengths=(10, 10, 10, 10), truncated=1),
    ]
    figures = figures_of(answers, pass_at=(1, 4), seed=3)
    assert (figures.problems, figures.accuracy) == (2, 0.5)
    assert [(each.k, each.value) for each in figures.pass_at] == [(1, 0.5), (4, 1.0)]
    assert [(each.k, each.value, each.problems) for each in figures.majority_at] == [(4, 0.5, 2)]
    assert (figures.majority_at[0].low, figures.majority_at[0].high) == wilson_interval(1, 2)
    assert (figures.length_mean, figures.truncated) == (6.25, 0.25)
    assert figures.length_p95 == 10.0


def test_evaluation_metrics_exclude_samples_without_a_verdict():
    (most,) = figures_of([done("xaabxx", "a", unjudged=(0, 4, 5))], pass_at=(3, 4), seed=0).majority_at
    assert (most.k, most.value) == (3, 1.0), "with the others, x would be taken"
    nothing = figures_of([done("aaa", "a", unjudged=(0, 1, 2))], pass_at=(1,), seed=0)
    assert (nothing.problems, nothing.accuracy, nothing.pass_at, nothing.majority_at) == (0, None, [], [])


def test_verifier_that_extracts_no_answers_has_no_maj_at_k():
    judge = done("---", "", domain="essay")
    assert figures_of([judge], pass_at=(3,), seed=0).majority_at == []
    both = figures_of([judge, done("aaa", "a")], pass_at=(3,), seed=0)
    assert (both.majority_at[0].value, both.majority_at[0].problems) == (1.0, 1)
    silent = figures_of([done("---", ""), done("aaa", "a")], pass_at=(3,), seed=0)
    assert silent.majority_at[0].value == 0.5, "in a domain that has answers, none is wrong"


def test_each_domain_and_each_tag_has_its_own_evaluation_metrics():
    answers = [
        done("a", "a", domain="math", tags=("level=1", "short")),
        done("b", "a", domain="math", tags=("level=2", "short")),
        done("a", "a", domain="code", tags=("level=1",)),
    ]
    domains = figures_by_domain(answers, pass_at=(1,), seed=0)
    assert {name: (each.problems, each.accuracy) for name, each in domains.items()} == {
        "code": (1, 1.0),
        "math": (2, 0.5),
    }
    tags = figures_by_tag(answers, pass_at=(), seed=0)
    assert {name: (each.problems, each.accuracy) for name, each in tags.items()} == {
        "level=1": (2, 1.0),
        "level=2": (1, 0.0),
        "short": (2, 0.5),
    }


def test_only_the_tags_with_the_most_problems_get_evaluation_metrics():
    rare = [done("a", "a", tags=(f"id={number}", "all")) for number in range(3 * MOST_TAGS)]
    assert len(figures_by_tag(rare, pass_at=(), seed=0)) == MOST_TAGS
    assert "all" in figures_by_tag(rare, pass_at=(), seed=0)


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
