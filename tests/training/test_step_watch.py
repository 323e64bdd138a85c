"""The step watch records training steps: samples with their advantages, and filtered groups with the reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelinerl.enums import NoSignal, Truncated
from pipelinerl.objective.presets import resolve
from pipelinerl.observability.samples.reading import read_samples
from pipelinerl.observability.samples.record import SampleKind, TokenTexts
from pipelinerl.observability.samples.sample_log import SampleLog
from pipelinerl.rng import generator
from pipelinerl.staleness import StalenessBounds
from pipelinerl.training.rollouts.admission import ConsumedLedger, GroupOutcome, Lineage
from pipelinerl.training.rollouts.batch import build
from pipelinerl.training.rollouts.batcher import Batcher, StepBudget
from pipelinerl.training.step_watch import (
    MOST_REASONS,
    MOST_TAGS,
    OTHER_REASONS,
    OTHER_TAGS,
    DomainTallies,
    StepWatch,
    Tally,
    TrainingSamples,
    mean_advantages,
)
from pipelinerl.types import ROOT, Outcome, ProblemSummary, RewardPart, Rollout, RolloutGroup, Verdict
from tests.fakes.rollouts import episode, group, rollout
from trainer_contract.types import LossStats


def spelled(token_ids: Sequence[int]) -> str:
    return "|".join(map(str, token_ids))


def watch_in(path: Path, *, groups_per_step: int = 2) -> StepWatch:
    log = SampleLog(path / "samples", "training", max_bytes=2**20)
    return StepWatch(TrainingSamples(log=log, decode=spelled, seed=7, groups_per_step=groups_per_step))


def stepped(
    watch: StepWatch, groups: list[RolloutGroup], *, version: int, truncated: Truncated = Truncated.TRAIN
) -> None:
    batch = build(groups, objective=resolve("grpo"), token_budget=1000, producing=version, truncated=truncated)
    watch.stepped(batch, batch.micro_batches, version=version)


def closed(watch: StepWatch) -> None:
    assert watch.samples is not None
    watch.samples.log.close()


def test_sample_kept_from_a_step_contains_prompt_answers_verdicts_and_advantages(tmp_path: Path) -> None:
    watch = watch_in(tmp_path)
    right = rollout(reward=1.0, prompt=(5, 6), sampled=(7, 8, 9), spans=((2, 1), (3, 2)))
    cut = replace(rollout(reward=0.0, prompt=(5, 6), version=1), finish_reason="length")
    broken = rollout(outcome=Outcome.VERIFIER_ERROR, prompt=(5, 6))
    made = replace(
        group(4),
        rollouts=(right, cut, broken),
        problem=ProblemSummary("words:1", ("easy",), "the truth"),
        domain="words",
    )
    stepped(watch, [made], version=4)
    closed(watch)
    (sample,) = read_samples(tmp_path)
    assert (sample.kind, sample.step, sample.domain, sample.tags) == (SampleKind.TRAINED, 4, "words", ("easy",))
    assert (sample.problem_id, sample.prompt, sample.ground_truth) == ("words:1", "5|6", "the truth")
    one, two, three = sample.answers
    assert (one.text, one.outcome, one.reward, one.length, one.finish_reason) == ("7|8|9", "correct", 1.0, 3, "stop")
    assert (one.spans, one.staleness, one.trained) == (((2, 1), (3, 2)), 2, True)
    assert one.advantage == pytest.approx(1.0, abs=1e-3) and two.advantage == pytest.approx(-1.0, abs=1e-3)
    assert (two.finish_reason, two.staleness, two.trained) == ("length", 3, True)
    assert (three.outcome, three.reward, three.advantage, three.trained) == ("verifier_error", None, None, False)


def test_sample_kept_from_a_step_contains_tokens_with_logprobs_versions_and_entropies(tmp_path: Path) -> None:
    watch = watch_in(tmp_path)
    right = rollout(reward=1.0, prompt=(5, 6), sampled=(7, 8, 9), spans=((2, 1), (3, 2)))
    wrong = rollout(reward=0.0, prompt=(5, 6), sampled=(7,), spans=((3, 1),))
    broken = rollout(outcome=Outcome.VERIFIER_ERROR, prompt=(5, 6))
    made = replace(group(4), rollouts=(right, wrong, broken))
    batch = build([made], objective=resolve("grpo"), token_budget=4, producing=4)
    assert len(batch.packed) > 1, "the rollouts of the group are in several micro-batches"
    losses = [LossStats(0.0, (each.behavior_logprobs - 0.125) * each.loss_mask) for each in batch.micro_batches]
    entropies = {0: np.array([0.5, 1.23456789, 0.0], np.float32)}
    watch.stepped(batch, batch.micro_batches, version=4, losses=losses, entropies=entropies)
    closed(watch)
    (sample,) = read_samples(tmp_path)
    assert sample.prompt_tokens == TokenTexts(ids=(5, 6), texts=("5", "6"))
    one, two, three = (each.tokens for each in sample.answers)
    assert one is not None and two is not None and three is not None
    assert one.tokens == TokenTexts(ids=(7, 8, 9), texts=("7", "8", "9")) and one.versions == (2, 3, 3)
    assert one.logprobs == pytest.approx(right.turns[0].behavior_logprobs.tolist()) and one.deltas == (-0.125,) * 3
    assert one.advantages == pytest.approx((1.0,) * 3, abs=1e-3) and two.advantages == pytest.approx((-1.0,), abs=1e-3)
    assert one.entropies == (0.5, 1.235, 0.0) and two.entropies == (), "few are measured"
    assert (three.deltas, three.advantages) == ((), ()), "it was not trained on"


def test_environment_tokens_in_a_kept_sample_have_no_model_version(tmp_path: Path) -> None:
    watch = watch_in(tmp_path)
    first = rollout(reward=1.0, prompt=(5, 6), sampled=(7, 8))
    later = replace(first.turns[0], context_token_ids=np.array([1, 2, 3], np.int32))
    stepped(watch, [replace(group(0), rollouts=(replace(first, turns=(*first.turns, later)), rollout()))], version=1)
    closed(watch)
    tokens = read_samples(tmp_path)[0].answers[0].tokens
    assert tokens is not None and tokens.tokens.ids == (7, 8, 1, 2, 3, 7, 8)
    assert [version is None for version in tokens.versions] == [False, False, True, True, True, False, False]
    assert tokens.deltas == (), "no log-probs of the trainer were given"


def test_logged_sample_of_one_turn_has_its_context_if_it_differs_from_the_prompt_of_the_group(tmp_path: Path) -> None:
    watch = watch_in(tmp_path)
    stepped(watch, [replace(group(0), rollouts=(rollout(prompt=(5, 6)), rollout(prompt=(1, 2))))], version=1)
    closed(watch)
    (sample,) = read_samples(tmp_path)
    assert [[turn.context for turn in each.turns] for each in sample.answers] == [[], ["1|2"]]


@pytest.mark.parametrize("budget", [6, 1000])
def test_logged_sample_of_a_branching_episode_lists_tokens_in_turn_order(tmp_path: Path, budget: int) -> None:
    watch = watch_in(tmp_path)
    turns = [((5, 6), (7, 8)), ((1,), (9,)), ((2, 3), (10, 11)), ((4,), (12,))]
    forked = episode(turns, (ROOT, ROOT, 0, 1), versions=(1, 1, 2, 3))
    batch = build(
        [replace(group(0), rollouts=(forked, rollout(reward=0.0, prompt=(5, 6))))],
        objective=resolve("grpo"),
        token_budget=budget,
        producing=4,
    )
    losses = [LossStats(0.0, -each.token_ids * each.loss_mask.astype(np.float32)) for each in batch.micro_batches]
    watch.stepped(batch, batch.micro_batches, version=4, losses=losses)
    closed(watch)
    (sample,) = read_samples(tmp_path)
    one = sample.answers[0]
    assert one.tokens is not None and one.staleness == 3 and one.length == 6
    assert one.tokens.tokens.ids == (7, 8, 1, 9, 2, 3, 10, 11, 4, 12)
    assert one.tokens.versions == (1, 1, None, 1, None, None, 2, 2, None, 3)
    assert one.tokens.deltas == (-6.5, -7.5, None, -8.5, None, None, -9.5, -10.5, None, -11.5)
    assert one.advantage == pytest.approx(1.0, abs=1e-3)
    assert [(each.text, each.context, each.segment, each.continues) for each in one.turns] == [
        ("7|8", "", 1, 0),
        ("9", "1", 2, 0),
        ("10|11", "2|3", 1, 1),
        ("12", "4", 2, 2),
    ]
    assert sample.answers[1].turns == (), "a single answer has none"


def test_truncated_rollout_in_mask_mode_is_kept_as_a_sample_without_advantage(tmp_path: Path) -> None:
    watch = watch_in(tmp_path)
    cut = replace(rollout(reward=0.0), finish_reason="length")
    stepped(watch, [replace(group(0), rollouts=(rollout(reward=1.0), cut))], version=1, truncated=Truncated.MASK)
    closed(watch)
    (sample,) = read_samples(tmp_path)
    assert [(each.advantage is None, each.trained) for each in sample.answers] == [(False, True), (True, False)]


def test_mean_advantage_of_each_rollout_does_not_depend_on_the_packing_into_micro_batches() -> None:
    groups = [group(0, [0.0, 1.0]), group(1, [1.0, 1.0]), group(2, [1.0, 0.0])]
    batch = build(groups, objective=resolve("grpo"), token_budget=5, producing=1)
    advantages, trained = mean_advantages(batch, batch.micro_batches)
    assert advantages == pytest.approx([-1, 1, 0, 0, 1, -1], abs=1e-3)
    assert trained.tolist() == [True, True, False, False, True, True], "those without a gradient were left out"


def test_choice_of_groups_kept_as_samples_is_determined_by_seed_and_step(tmp_path: Path) -> None:
    drawn = []
    for name in ("first", "again"):
        watch = watch_in(tmp_path / name)
        for version in range(1, 21):
            stepped(watch, [group(index) for index in range(8)], version=version)
        closed(watch)
        drawn.append([(each.step, each.group_id) for each in read_samples(tmp_path / name)])
    assert drawn[0] == drawn[1] and len(drawn[0]) == 40
    assert len({name for _, name in drawn[0]}) == 8, "no group is preferred"


def test_filter_reasons_beyond_a_maximum_number_are_counted_as_other_reasons(tmp_path: Path) -> None:
    watch = watch_in(tmp_path)
    watch.ended([group(0)], GroupOutcome.FILTERED, "no signal")
    for number in range(100):
        watch.ended([group(number)], GroupOutcome.FILTERED, f"one of {number} tokens")
    watch.ended([group(1)], GroupOutcome.FILTERED, "no signal")
    stepped(watch, [group(101)], version=1)
    closed(watch)
    (example,) = [each for each in read_samples(tmp_path) if each.kind is SampleKind.FILTERED]
    assert len(example.filtered) == MOST_REASONS + 1 and example.filtered["no signal"] == 2
    assert example.filtered[OTHER_REASONS] == 102 - MOST_REASONS - 1


def test_filtered_groups_are_counted_by_reason_and_one_is_kept_as_an_example(tmp_path: Path) -> None:
    watch = watch_in(tmp_path)
    batcher = Batcher(ledger=ConsumedLedger(), lineage=Lineage(1, 0), no_signal=NoSignal.FILTER, ended=watch.ended)
    for index, made in enumerate(
        [group(0, [1.0, 1.0]), group(1, [0.0, 0.0]), group(2), group(3, version=-9), group(4)]
    ):
        batcher.offer(made if index != 1 else replace(made, domain="sums"))
    unjudged = replace(group(5), rollouts=(rollout(outcome=Outcome.TIMEOUT),))
    batcher.offer(unjudged)
    taken = batcher.take(StepBudget(rollouts=4), producing=1, bounds=StalenessBounds(1, 4))
    assert taken is not None
    batch = build(taken, objective=resolve("grpo"), token_budget=1000, producing=1)
    figures = watch.stepped(batch, batch.micro_batches, version=1)
    stepped(watch, [group(9)], version=2)
    closed(watch)
    (example,) = [each for each in read_samples(tmp_path) if each.kind is SampleKind.FILTERED]
    assert example.filtered == {"no signal": 2, "no verdict": 1}
    assert (example.group_id, example.why, example.step) == (unjudged.group_id, "no verdict", 1)
    assert figures.by_domain["test"]["groups"] == 4 and figures.by_domain["test"]["stale_groups"] == 1
    assert figures.by_domain["sums"]["all_wrong"] == 1.0


def test_step_metrics_are_computed_even_if_no_sample_log_is_written() -> None:
    watch = StepWatch()
    watch.ended([group(0)], GroupOutcome.STALE, "stale")
    batch = build([group(1)], objective=resolve("grpo"), token_budget=1000, producing=1)
    assert watch.stepped(batch, batch.micro_batches, version=1).by_domain["test"]["stale"] == 0.5


def test_sample_with_a_non_finite_reward_is_kept_without_its_reward(tmp_path: Path) -> None:
    watch = watch_in(tmp_path)
    with np.errstate(invalid="ignore"):
        stepped(watch, [replace(group(0), rollouts=(rollout(reward=np.inf), rollout(reward=0.0)))], version=1)
    closed(watch)
    (sample,) = read_samples(tmp_path)
    assert sample.answers[0].reward is None and sample.answers[1].reward == 0.0


def graded(rewards: Sequence[float], *, domain: str = "words", tags: Sequence[str] = (), **fields: Any) -> RolloutGroup:
    made = replace(group(0, rewards), domain=domain, problem=ProblemSummary("p", tuple(tags), ""))
    return replace(made, **fields) if fields else made


def scored(reward: float, *parts: tuple[str, float]) -> Rollout:
    verdict = Verdict(outcome=Outcome.CORRECT, reward=reward, parts=tuple(RewardPart(*part) for part in parts))
    return replace(rollout(), verdict=verdict)


def test_domain_metrics_match_precomputed_values() -> None:
    tallies = DomainTallies()
    long = rollout(reward=0.0, sampled=[1] * 20)
    mixed = graded(
        [], rollouts=(rollout(reward=1.0), replace(long, finish_reason="length"), rollout(outcome=Outcome.TIMEOUT))
    )
    tallies.add([mixed, graded([1.0, 1.0]), graded([0.0, 0.0]), graded([0.0, 0.0])])
    tallies.add_stale(graded([1.0]))
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
    tallies.add([graded([], rollouts=rollouts)])
    figures = tallies.take().by_domain["words"]
    assert (figures["reward"], figures["reward.format"], figures["reward.answer"]) == (1.0, 0.75, 0.0)


def test_group_counts_once_in_its_domain_and_once_in_each_of_its_tags() -> None:
    tallies = DomainTallies()
    tallies.add([graded([1.0], tags=("a", "b", "a")), graded([0.0], tags=("b",), domain="sums")])
    figures = tallies.take()
    assert {name: each["accuracy"] for name, each in figures.by_domain.items()} == {"words": 1.0, "sums": 0.0}
    assert {name: each["accuracy"] for name, each in figures.by_tag.items()} == {"a": 1.0, "b": 0.5}
    assert [each["rollouts"] for each in figures.by_tag.values()] == [1, 2]
    assert tallies.take() == ({}, {}), "the next step begins from nothing"


def test_domain_with_only_stale_groups_reports_only_the_counts_of_groups() -> None:
    tallies = DomainTallies()
    tallies.add_stale(graded([1.0]))
    assert tallies.take().by_domain["words"] == {"rollouts": 0, "groups": 0, "stale_groups": 1, "stale": 1.0}


def test_rare_tags_beyond_a_limit_share_one_set_of_metrics() -> None:
    tallies = DomainTallies()
    tallies.add([graded([1.0], tags=(f"id={number:04d}",)) for number in range(1000)])
    tallies.add([graded([1.0, 1.0], tags=("common",)), graded([1.0], tags=tuple(f"t{i}" for i in range(1000)))])
    by_tag = tallies.take().by_tag
    assert len(by_tag) == MOST_TAGS + 1 and "common" in by_tag
    assert by_tag[OTHER_TAGS]["rollouts"] == 1000 + 16 - (MOST_TAGS - 1)


@pytest.mark.parametrize("count", [1, 2, 3, 20, 21, 257])
def test_p95_of_answer_lengths_equals_numpys_percentile(count: int) -> None:
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
    tallies.add([graded([], rollouts=(forked, single, forked)), graded([1.0], domain="sums")])
    by_domain = tallies.take().by_domain
    figures = by_domain["words"]
    assert figures["turns"] == pytest.approx(7 / 3) and figures["segments"] == pytest.approx(5 / 3)
    assert (figures["segments.first"], figures["segments.forked"]) == (3, 2)
    assert not {"turns", "segments"} & by_domain["sums"].keys()
