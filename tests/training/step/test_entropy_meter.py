"""The exact entropy is that of the distributions, by any trainer, and measuring it changes nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelinerl.models.bigram import BigramModel
from pipelinerl.objective.presets import resolve
from pipelinerl.trainers.bigram.trainer import BigramTrainer
from pipelinerl.training.rollouts.batch import TrainBatch, build
from pipelinerl.training.step.entropy_meter import EXACT_ENTROPY, EntropyMeter
from pipelinerl.training.step.forward_passes import ForwardPasses
from pipelinerl.training.step.train_step import TrainStep
from tests.fakes.rollouts import group
from trainer_contract.types import OptimizerSpec, TrainerSpec

VOCAB = 7
OBJECTIVE = resolve("grpo")


@pytest.fixture
def spec(tmp_path: Path) -> TrainerSpec:
    BigramModel.random(VOCAB, seed=4).save(tmp_path / "model")
    return TrainerSpec(model_path=tmp_path / "model", optimizer=OptimizerSpec(eps=1.0, grad_clip=0.0))


def worker(spec: TrainerSpec) -> BigramTrainer:
    made = BigramTrainer()
    made.init_worker(spec)
    return made


def batch(groups: int = 20, *, producing: int = 1) -> TrainBatch:
    made = [group(index) for index in range(groups)]
    return build(made, objective=OBJECTIVE, token_budget=64, producing=producing)


def test_it_is_the_mean_entropy_of_the_distributions_of_the_sampled_tokens(spec: TrainerSpec) -> None:
    made = worker(spec)
    (_, logits), *_ = made.gather_weights()
    shifted = logits - logits.max(axis=1, keepdims=True)
    logprobs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    entropy = -(np.exp(logprobs) * logprobs).sum(axis=1)
    expected = entropy[[2, 3]].mean()  # each rollout samples 3 and 4 after the prompt 1, 2
    assert EntropyMeter(1).measure(made, batch()) == {EXACT_ENTROPY: pytest.approx(expected, rel=1e-5)}


def test_a_step_is_the_same_to_the_bit_with_and_without(spec: TrainerSpec) -> None:
    results = []
    for meter in (EntropyMeter(0), EntropyMeter(1)):
        step = TrainStep(passes=ForwardPasses(policy=worker(spec)), entropy=meter)
        figures = [step.apply(step.accumulate(batch(), OBJECTIVE), learning_rates=[0.1]).figures for _ in range(3)]
        (_, weights), *_ = step.passes.policy.gather_weights()
        results.append((figures, weights.tobytes()))
    (without, plain), (with_it, measured) = results
    assert plain == measured
    assert [each.pop(EXACT_ENTROPY) > 0 for each in with_it] == [True] * 3 and with_it == without


def test_only_every_so_many_steps(spec: TrainerSpec) -> None:
    step = TrainStep(passes=ForwardPasses(policy=worker(spec)), entropy=EntropyMeter(3))
    batches = [batch(producing=version) for version in range(1, 8)]
    figures = [step.apply(step.accumulate(each, OBJECTIVE), learning_rates=[0.1]).figures for each in batches]
    assert [EXACT_ENTROPY in each for each in figures] == [False, False, True, False, False, True, False]
