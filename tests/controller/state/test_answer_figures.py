"""Tests of evaluation metrics by domain and tag, against values computed manually or by enumeration."""

import itertools
from statistics import fmean

import pytest

from pipelinerl.controller.state.answer_figures import (
    MOST_TAGS,
    figures_by_domain,
    figures_by_tag,
    figures_of,
    majority_right,
    wilson_interval,
)
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


def test_equal_seeds_give_equal_confidence_intervals():
    answers = [done(letters, "a") for letters in ("aabb", "aaab", "abbb", "aaaa")]
    one, same = (figures_of(answers, pass_at=(2,), seed=1) for _ in range(2))
    assert one == same
    assert one.low is not None and one.high is not None and one.low < 0.625 < one.high
