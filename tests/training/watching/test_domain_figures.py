"""Metrics by domain and tag against hand-made counts, and their bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipelinerl.rng import generator
from pipelinerl.training.watching.domain_figures import MOST_TAGS, OTHER_TAGS, DomainTallies, Tally
from pipelinerl.types import ROOT, Outcome, ProblemSummary, RewardPart, Rollout, RolloutGroup, Verdict
from tests.fakes.rollouts import episode, group, rollout


def told(rewards: Sequence[float], *, domain: str = "words", tags: Sequence[str] = (), **fields: Any) -> RolloutGroup:
    made = replace(group(0, rewards), domain=domain, problem=ProblemSummary("p", tuple(tags), ""))
    return replace(made, **fields) if fields else made


def scored(reward: float, *parts: tuple[str, float]) -> Rollout:
    verdict = Verdict(outcome=Outcome.CORRECT, reward=reward, parts=tuple(RewardPart(*part) for part in parts))
    return replace(rollout(), verdict=verdict)


def test_every_metric_of_a_domain() -> None:
    tallies = DomainTallies()
    long = rollout(reward=0.0, sampled=[1] * 20)
    mixed = told(
        [], rollouts=(rollout(reward=1.0), replace(long, finish_reason="length"), rollout(outcome=Outcome.TIMEOUT))
    )
    tallies.add([mixed, told([1.0, 1.0]), told([0.0, 0.0]), told([0.0, 0.0])])
    tallies.add_stale(told([1.0]))
    figures = tallies.take().by_domain["words"]
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


def test_reward_parts_are_averaged_over_the_rollouts_that_have_them() -> None:
    tallies = DomainTallies()
    rollouts = (scored(1.0, ("format", 1.0), ("answer", 0.0)), scored(2.0, ("format", 0.5)), scored(0.0))
    tallies.add([told([], rollouts=rollouts)])
    figures = tallies.take().by_domain["words"]
    assert (figures["reward"], figures["reward.format"], figures["reward.answer"]) == (1.0, 0.75, 0.0)


def test_group_counts_once_in_its_domain_and_in_each_tag() -> None:
    tallies = DomainTallies()
    tallies.add([told([1.0], tags=("a", "b", "a")), told([0.0], tags=("b",), domain="sums")])
    figures = tallies.take()
    assert {name: each["accuracy"] for name, each in figures.by_domain.items()} == {"words": 1.0, "sums": 0.0}
    assert {name: each["accuracy"] for name, each in figures.by_tag.items()} == {"a": 1.0, "b": 0.5}
    assert [each["rollouts"] for each in figures.by_tag.values()] == [1, 2]
    assert tallies.take() == ({}, {}), "the next step begins from nothing"


def test_domain_with_only_stale_groups_reports_only_them() -> None:
    tallies = DomainTallies()
    tallies.add_stale(told([1.0]))
    assert tallies.take().by_domain["words"] == {"rollouts": 0, "groups": 0, "stale_groups": 1, "stale": 1.0}


def test_rare_tags_are_merged_beyond_the_limit() -> None:
    tallies = DomainTallies()
    tallies.add([told([1.0], tags=(f"id={number:04d}",)) for number in range(1000)])
    tallies.add([told([1.0, 1.0], tags=("common",)), told([1.0], tags=tuple(f"t{i}" for i in range(1000)))])
    by_tag = tallies.take().by_tag
    assert len(by_tag) == MOST_TAGS + 1 and "common" in by_tag
    assert by_tag[OTHER_TAGS]["rollouts"] == 1000 + 16 - (MOST_TAGS - 1)


@pytest.mark.parametrize("count", [1, 2, 3, 20, 21, 257])
def test_p95_of_lengths_equals_numpy(count: int) -> None:
    lengths = sorted(generator(0, "p95", count).integers(0, 5000, count).tolist())
    tally = Tally(groups=1, lengths=lengths[::-1])
    assert tally.figures()["length_p95"] == pytest.approx(np.percentile(lengths, 95), rel=1e-12)
    assert tally.figures()["length_mean"] == pytest.approx(np.mean(lengths), rel=1e-12)


def test_turns_and_segments_are_counted_only_for_episodes() -> None:
    tallies = DomainTallies()
    turns = episode([((0,), (1,)), ((2,), (3,)), ((4,), (5,))], (ROOT, 0, 0)).turns
    begins = ("first", "", "forked")
    noted = tuple(replace(turn, note=turn.note._replace(begins=why)) for turn, why in zip(turns, begins, strict=True))
    forked = replace(episode([((0,), (1,))]), turns=noted, parents=(ROOT, 0, 0))
    single = replace(forked, turns=noted[:1], parents=())
    tallies.add([told([], rollouts=(forked, single, forked)), told([1.0], domain="sums")])
    by_domain = tallies.take().by_domain
    figures = by_domain["words"]
    assert figures["turns"] == pytest.approx(7 / 3) and figures["segments"] == pytest.approx(5 / 3)
    assert (figures["segments.first"], figures["segments.forked"]) == (3, 2)
    assert not {"turns", "segments"} & by_domain["sums"].keys()
