"""The log of samples has groups of each step with their advantages, and filtered groups with the reasons."""

from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest

from pipelinerl.enums import Truncated
from pipelinerl.observability.samples import SampleKind, SampleLog, TokenTexts, read_samples
from pipelinerl.training.passes import MeasuredEntropy
from pipelinerl.training.step import Accumulated, Gradient
from pipelinerl.training.step_samples import MOST_REASONS, OTHER_REASONS, StepSamples
from pipelinerl.types import ROOT, Outcome, ProblemSummary
from tests.fakes.batches import batch_of
from tests.fakes.rollouts import episode, group, rollout
from trainer_contract.types import LossStats


def spelled(token_ids):
    return "|".join(map(str, token_ids))


def samples_in(path):
    log = SampleLog(path / "samples", "training", max_bytes=2**20)
    return StepSamples(log, spelled, seed=7, groups_per_step=2)


def write(samples, batch, *, logprobs=(), entropies=MappingProxyType({})):
    losses = [LossStats(0.0, each) for each in logprobs]
    first = Gradient(batch=batch, losses=losses, value_losses=[], cross_entropy=None)
    measured = MeasuredEntropy(of_tokens=entropies)
    samples.write(Accumulated(batch=batch, first=first, rest=iter(()), measured=measured))


def logged(path, batch, **computed):
    """Return the sample of a step with one group."""
    samples = samples_in(path)
    write(samples, batch, **computed)
    samples.log.close()
    (sample,) = read_samples(path)
    return sample


def test_sample_kept_from_a_step_contains_prompt_answers_verdicts_and_advantages(tmp_path):
    right = rollout(reward=1.0, prompt=(5, 6), sampled=(7, 8, 9), spans=((2, 1), (3, 2)))
    cut = replace(rollout(reward=0.0, prompt=(5, 6), version=1), finish_reason="length")
    broken = rollout(outcome=Outcome.VERIFIER_ERROR, prompt=(5, 6))
    made = replace(
        group(4),
        rollouts=(right, cut, broken),
        problem=ProblemSummary("words:1", ("easy",), "the truth"),
        domain="words",
    )
    sample = logged(tmp_path, batch_of([made], producing=4))
    assert (sample.kind, sample.step, sample.domain, sample.tags) == (SampleKind.TRAINED, 4, "words", ("easy",))
    assert (sample.problem_id, sample.prompt, sample.ground_truth) == ("words:1", "5|6", "the truth")
    one, two, three = sample.answers
    assert (one.text, one.outcome, one.reward, one.length, one.finish_reason) == ("7|8|9", "correct", 1.0, 3, "stop")
    assert (one.spans, one.staleness, one.trained) == (((2, 1), (3, 2)), 2, True)
    assert one.advantage == pytest.approx(1.0, abs=1e-3) and two.advantage == pytest.approx(-1.0, abs=1e-3)
    assert (two.finish_reason, two.staleness, two.trained) == ("length", 3, True)
    assert (three.outcome, three.reward, three.advantage, three.trained) == ("verifier_error", None, None, False)


def test_sample_kept_from_a_step_contains_tokens_with_logprobs_versions_and_entropies(tmp_path):
    right = rollout(reward=1.0, prompt=(5, 6), sampled=(7, 8, 9), spans=((2, 1), (3, 2)))
    wrong = rollout(reward=0.0, prompt=(5, 6), sampled=(7,), spans=((3, 1),))
    broken = rollout(outcome=Outcome.VERIFIER_ERROR, prompt=(5, 6))
    made = replace(group(4), rollouts=(right, wrong, broken))
    batch = batch_of([made], producing=4, token_budget=4)
    assert len(batch.packed) > 1, "the rollouts of the group are in several micro-batches"
    logprobs = [(each.behavior_logprobs - 0.125) * each.loss_mask for each in batch.micro_batches]
    entropies = {0: np.array([0.5, 1.23456789, 0.0], np.float32)}
    sample = logged(tmp_path, batch, logprobs=logprobs, entropies=entropies)
    assert sample.prompt_tokens == TokenTexts(ids=(5, 6), texts=("5", "6"))
    one, two, three = (each.tokens for each in sample.answers)
    assert one is not None and two is not None and three is not None
    assert one.tokens == TokenTexts(ids=(7, 8, 9), texts=("7", "8", "9")) and one.versions == (2, 3, 3)
    assert one.logprobs == pytest.approx(right.turns[0].behavior_logprobs.tolist()) and one.deltas == (-0.125,) * 3
    assert one.advantages == pytest.approx((1.0,) * 3, abs=1e-3) and two.advantages == pytest.approx((-1.0,), abs=1e-3)
    assert one.entropies == (0.5, 1.235, 0.0) and two.entropies == (), "few are measured"
    assert (three.deltas, three.advantages) == ((), ()), "it was not trained on"


def test_logged_sample_of_one_turn_has_its_context_if_it_differs_from_the_prompt_of_the_group(tmp_path):
    sample = logged(tmp_path, batch_of([replace(group(0), rollouts=(rollout(prompt=(5, 6)), rollout(prompt=(1, 2))))]))
    assert [[turn.context for turn in each.turns] for each in sample.answers] == [[], ["1|2"]]


@pytest.mark.parametrize("budget", [6, 1000])
def test_logged_sample_of_a_branching_episode_lists_tokens_in_turn_order(tmp_path, budget):
    turns = [((5, 6), (7, 8)), ((1,), (9,)), ((2, 3), (10, 11)), ((4,), (12,))]
    forked = episode(turns, (ROOT, ROOT, 0, 1), versions=(1, 1, 2, 3))
    batch = batch_of(
        [replace(group(0), rollouts=(forked, rollout(reward=0.0, prompt=(5, 6))))], producing=4, token_budget=budget
    )
    logprobs = [-each.token_ids * each.loss_mask.astype(np.float32) for each in batch.micro_batches]
    sample = logged(tmp_path, batch, logprobs=logprobs)
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


def test_truncated_rollout_in_mask_mode_is_kept_as_a_sample_without_advantage(tmp_path):
    cut = replace(rollout(reward=0.0), finish_reason="length")
    sample = logged(
        tmp_path, batch_of([replace(group(0), rollouts=(rollout(reward=1.0), cut))], truncated=Truncated.MASK)
    )
    assert [(each.advantage is None, each.trained) for each in sample.answers] == [(False, True), (True, False)]


def test_choice_of_groups_kept_as_samples_is_determined_by_seed_and_step(tmp_path):
    drawn = []
    for name in ("first", "again"):
        samples = samples_in(tmp_path / name)
        for version in range(1, 21):
            write(samples, batch_of([group(index) for index in range(8)], producing=version))
        samples.log.close()
        drawn.append([(each.step, each.group_id) for each in read_samples(tmp_path / name)])
    assert drawn[0] == drawn[1] and len(drawn[0]) == 40
    assert len({name for _, name in drawn[0]}) == 8, "no group is preferred"


def test_filtered_groups_are_counted_by_reason_and_the_last_one_is_kept_as_an_example(tmp_path):
    """Reasons beyond a maximum number are counted together."""
    samples = samples_in(tmp_path)
    samples.note_filtered([group(0)], "no signal")
    for number in range(100):
        samples.note_filtered([group(number)], f"one of {number} tokens")
    samples.note_filtered([group(1), group(2)], "no signal")
    write(samples, batch_of([group(101)]))
    write(samples, batch_of([group(102)], producing=2))
    samples.log.close()
    (example,) = [each for each in read_samples(tmp_path) if each.kind is SampleKind.FILTERED]
    assert (example.group_id, example.why, example.step) == (group(2).group_id, "no signal", 1)
    assert len(example.filtered) == MOST_REASONS + 1 and example.filtered["no signal"] == 3
    assert example.filtered[OTHER_REASONS] == 103 - MOST_REASONS - 2


def test_sample_with_a_non_finite_reward_is_kept_without_its_reward(tmp_path):
    with np.errstate(invalid="ignore"):
        sample = logged(tmp_path, batch_of([replace(group(0), rollouts=(rollout(reward=np.inf), rollout(reward=0.0)))]))
    assert sample.answers[0].reward is None and sample.answers[1].reward == 0.0
