"""The measured entropy equals that of the model's distributions on any trainer; measuring does not change training."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from pipelinerl.objective.presets import resolve
from pipelinerl.training.passes import EXACT_ENTROPY, EntropyMeter, ForwardPasses
from pipelinerl.types import ROOT
from tests.fakes.batches import batch_of, bigram, step_on
from tests.fakes.rollouts import episode, group
from trainer_contract.types import OptimizerSpec

OBJECTIVE = resolve("grpo")


@pytest.fixture
def worker(tmp_path):
    return partial(bigram, tmp_path / "model", optimizer=OptimizerSpec(eps=1.0, grad_clip=0.0))


def entropies(policy):
    """Return the entropy after each token of the vocabulary, in nats."""
    (_, logits), *_ = policy.gather_weights()
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return -(np.exp(logprobs) * logprobs).sum(axis=1)


def batch(groups=20, *, producing=1):
    made = [group(index) for index in range(groups)]
    return batch_of(made, OBJECTIVE, producing=producing, token_budget=64)


def test_entropy_is_measured_first_for_groups_that_are_kept_as_samples(worker):
    made = worker()
    entropy = entropies(made)
    # The batch has 80 rollouts; the meter measures the entropy of 5 of them.
    measured = EntropyMeter(1, seed=7, logged_groups=2).measure(made, batch(40, producing=3))
    first, second = batch(40, producing=3).drawn(7, 2)
    assert {2 * first, 2 * first + 1, 2 * second} < measured.of_tokens.keys(), "in turn, three of five"
    assert len(measured.of_tokens) == 5
    for tokens in measured.of_tokens.values():
        np.testing.assert_allclose(tokens, entropy[[2, 3]], rtol=1e-5)
    everyone = np.concatenate(list(measured.of_tokens.values()))
    assert measured.figures[EXACT_ENTROPY] == pytest.approx(everyone.mean(), rel=1e-6)
    assert len(EntropyMeter(1).measure(made, batch(40)).of_tokens) == 5, "as many where none is kept"


def test_measured_entropies_of_a_branching_episode_are_in_the_order_of_its_turns(worker):
    made = worker()
    entropy = entropies(made)
    turns = [((0, 1), (2,)), ((3,), (4,)), ((5, 6), (0, 2)), ((4,), (1,))]
    # Two agents alternate, so one segment consists of turns 0 and 2, the other of turns 1 and 3.
    forked = episode(turns, (ROOT, ROOT, 0, 1))
    groups = [replace(group(0), rollouts=(forked, episode(turns, reward=0.0)))]
    measured = EntropyMeter(1).measure(made, batch_of(groups, OBJECTIVE, token_budget=64))
    np.testing.assert_allclose(measured.of_tokens[0], entropy[[1, 3, 6, 0, 4]], rtol=1e-5)


@pytest.mark.parametrize("groups", [1, 2, 8, 9, 33])
@pytest.mark.parametrize("most", [0, 1, 2, 50])
def test_number_of_rollouts_with_measured_entropy_does_not_depend_on_how_many_samples_are_kept(worker, groups, most):
    meter = EntropyMeter(1, logged_groups=most)
    measured = meter.measure(worker(), batch(groups)).of_tokens
    assert len(measured) in {-(-2 * groups // 16), -(-2 * groups // 16) - 1} and len(measured) >= 1


def test_training_step_is_bit_identical_with_and_without_the_entropy_meter(worker):
    results = []
    for meter in (EntropyMeter(0), EntropyMeter(1)):
        step = step_on(ForwardPasses(policy=worker()), entropy=meter)
        figures = [step.apply(step.accumulate(batch()), learning_rates=[0.1]).figures for _ in range(3)]
        (_, weights), *_ = step.passes.policy.gather_weights()
        results.append((figures, weights.tobytes()))
    (without, plain), (with_it, measured) = results
    assert plain == measured
    assert [each.pop(EXACT_ENTROPY) > 0 for each in with_it] == [True] * 3 and with_it == without


def test_entropy_is_measured_at_the_configured_interval_of_steps(worker):
    step = step_on(ForwardPasses(policy=worker()), entropy=EntropyMeter(3))
    batches = [batch(producing=version) for version in range(1, 8)]
    figures = [step.apply(step.accumulate(each), learning_rates=[0.1]).figures for each in batches]
    assert [EXACT_ENTROPY in each for each in figures] == [False, False, True, False, False, True, False]
