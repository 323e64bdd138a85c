"""Metrics of the groups that ended since the last step, by domain and by tag."""

from dataclasses import replace

import numpy as np
import pytest

from pipelinerl.rng import generator
from pipelinerl.training.domain_metrics import MOST_TAGS, OTHER_TAGS, DomainMetrics, Tally
from pipelinerl.types import ROOT, Outcome, ProblemSummary, RewardPart, Verdict
from tests.fakes.rollouts import episode, group, rollout


def graded(rewards, *, domain="words", tags=(), **fields):
    made = replace(group(0, rewards), domain=domain, problem=ProblemSummary("p", tuple(tags), ""))
    return replace(made, **fields) if fields else made


def scored(reward, *parts):
    verdict = Verdict(outcome=Outcome.CORRECT, reward=reward, parts=tuple(RewardPart(*part) for part in parts))
    return replace(rollout(), verdict=verdict)


def test_domain_metrics_match_precomputed_values():
    metrics = DomainMetrics()
    long = rollout(reward=0.0, sampled=[1] * 20)
    mixed = graded(
        [], rollouts=(rollout(reward=1.0), replace(long, finish_reason="length"), rollout(outcome=Outcome.TIMEOUT))
    )
    metrics.add([mixed, graded([1.0, 1.0]), graded([0.0, 0.0]), graded([0.0, 0.0])])
    metrics.add([graded([1.0])], stale=True)
    figures = metrics.take().by_domain["words"]
    assert figures == pytest.approx(
        {
            "rollouts": 9,
            "groups": 4,
            "stale_groups": 1,
            "stale": 0.2,
            "length_mean": (8 * 2 + 20) / 9,
            "length_p95": 12.8,
            "truncated": 1 / 9,
            "unjudged": 1 / 9,
            "reward": 3 / 8,
            "accuracy": 3 / 8,
            "all_right": 1 / 4,
            "all_wrong": 2 / 4,
        }
    )


def test_reward_parts_are_averaged_over_the_rollouts_that_have_them():
    metrics = DomainMetrics()
    rollouts = (scored(1.0, ("format", 1.0), ("answer", 0.0)), scored(2.0, ("format", 0.5)), scored(0.0))
    metrics.add([graded([], rollouts=rollouts)])
    figures = metrics.take().by_domain["words"]
    assert (figures["reward"], figures["reward.format"], figures["reward.answer"]) == (1.0, 0.75, 0.0)


def test_group_counts_once_in_its_domain_and_once_in_each_of_its_tags():
    metrics = DomainMetrics()
    metrics.add([graded([1.0], tags=("a", "b", "a")), graded([0.0], tags=("b",), domain="sums")])
    figures = metrics.take()
    assert {name: each["accuracy"] for name, each in figures.by_domain.items()} == {"words": 1.0, "sums": 0.0}
    assert {name: each["accuracy"] for name, each in figures.by_tag.items()} == {"a": 1.0, "b": 0.5}
    assert [each["rollouts"] for each in figures.by_tag.values()] == [1, 2]
    assert metrics.take() == ({}, {}), "the next step begins from nothing"


def test_domain_with_only_stale_groups_reports_only_the_counts_of_groups():
    metrics = DomainMetrics()
    metrics.add([graded([1.0])], stale=True)
    assert metrics.take().by_domain["words"] == {"rollouts": 0, "groups": 0, "stale_groups": 1, "stale": 1.0}


def test_rare_tags_beyond_a_limit_share_one_set_of_metrics():
    metrics = DomainMetrics()
    metrics.add([graded([1.0], tags=(f"id={number:04d}",)) for number in range(1000)])
    metrics.add([graded([1.0, 1.0], tags=("common",)), graded([1.0], tags=tuple(f"t{i}" for i in range(1000)))])
    by_tag = metrics.take().by_tag
    assert len(by_tag) == MOST_TAGS + 1 and "common" in by_tag
    assert by_tag[OTHER_TAGS]["rollouts"] == 1000 + 16 - (MOST_TAGS - 1)


@pytest.mark.parametrize("count", [1, 2, 3, 20, 21, 257])
def test_p95_of_answer_lengths_equals_numpys_percentile(count):
    lengths = sorted(generator(0, "p95", count).integers(0, 5000, count).tolist())
    tally = Tally(groups=1, lengths=lengths[::-1])
    assert tally.figures()["length_p95"] == pytest.approx(np.percentile(lengths, 95), rel=1e-12)
    assert tally.figures()["length_mean"] == pytest.approx(np.mean(lengths), rel=1e-12)


def test_turns_and_segments_are_counted_only_for_episodes():
    metrics = DomainMetrics()
    turns = episode([((0,), (1,)), ((2,), (3,)), ((4,), (5,))], (ROOT, 0, 0)).turns
    begins = ("first", "", "forked")
    noted = tuple(replace(turn, note=turn.note._replace(begins=why)) for turn, why in zip(turns, begins, strict=True))
    forked = replace(episode([((0,), (1,))]), turns=noted, parents=(ROOT, 0, 0))
    single = replace(forked, turns=noted[:1], parents=())
    metrics.add([graded([], rollouts=(forked, single, forked)), graded([1.0], domain="sums")])
    by_domain = metrics.take().by_domain
    figures = by_domain["words"]
    assert figures["turns"] == pytest.approx(7 / 3) and figures["segments"] == pytest.approx(5 / 3)
    assert (figures["segments.first"], figures["segments.forked"]) == (3, 2)
    assert not {"turns", "segments"} & by_domain["sums"].keys()
