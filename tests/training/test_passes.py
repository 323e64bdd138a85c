"""`old_logprobs` computed with the weights that sampled each token equal a plain loop, and cost no unneeded tokens."""

from dataclasses import replace

import numpy as np
import pytest

from pipelinerl import rng
from pipelinerl.enums import OldLogprobs
from pipelinerl.objective.presets import resolve
from pipelinerl.plugins.warmstart.tiny_decoder import DecoderShape, random_decoder
from pipelinerl.trainers.torch.trainer import TorchTrainer
from pipelinerl.training.passes import ForwardPasses
from pipelinerl.training.weight_history import WeightHistory
from pipelinerl.types import ROOT
from tests.fakes.batches import batch_of, bigram, step_on
from tests.fakes.rollouts import group, rollout
from trainer_contract.types import Device, TrainerSpec

VOCAB = 16
OBJECTIVE = resolve("ppo_recomputed")


@pytest.fixture(params=["bigram", "torch"])
def trainer(request, tmp_path):
    if request.param == "bigram":
        return bigram(tmp_path / "model", vocab=VOCAB, seed=1)
    shape = DecoderShape(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, vocab=VOCAB, max_positions=64)
    random_decoder(shape).save_pretrained(tmp_path / "model")
    made = TorchTrainer()
    made.init_worker(TrainerSpec(model_path=tmp_path / "model", device=Device.CPU))
    return made


def sampled(seed, spans, *, turns=1, reward=1.0):
    """Return a rollout of random tokens; every turn has these version spans, with environment tokens between turns."""
    draw = rng.generator(seed, "passes")
    number = sum(count for _, count in spans)
    parts = [
        rollout(
            prompt=draw.integers(0, VOCAB, 3).tolist(),
            sampled=draw.integers(0, VOCAB, number).tolist(),
            spans=spans,
            logprob=-2.0,
        ).turns[0]
        for _ in range(turns)
    ]
    return replace(rollout(reward=reward), turns=tuple(parts))


def mixed():
    """Return a group of rollouts, each of which was sampled by one, two or three model versions."""
    members = [
        sampled(1, [(0, 5)]),
        sampled(2, [(0, 2), (1, 3)], reward=0.0),
        sampled(3, [(0, 1), (1, 4), (2, 2)], turns=2),
        sampled(4, [(2, 6)], reward=0.0),
        sampled(5, [(1, 4)]),
    ]
    return [replace(group(0), rollouts=tuple(members))]


def in_one_batch(groups, *, budget=1000, producing=3):
    return batch_of(groups, OBJECTIVE, producing=producing, token_budget=budget)


def warmed_up(trainer, *, steps):
    """Return a train step whose weight history has versions 0 to `steps`, and each version's log-probs of `mixed()`."""
    history = WeightHistory(trainer.weight_layout())
    step = step_on(ForwardPasses(policy=trainer, old_logprobs=OldLogprobs.SAMPLING_WEIGHTS, history=history))
    alone = [in_one_batch([replace(group(0), rollouts=(one,))]).micro_batches[0] for one in mixed()[0].rollouts]
    predicted = {}
    for version in range(steps + 1):
        step.will_sample(version, acceptance=8)
        predicted[version] = trainer.forward(alone)
        if version < steps:
            fresh = [replace(group(0), rollouts=(sampled(9, [(version, 5)]), sampled(8, [(version, 4)], reward=0.0)))]
            result = step.accumulate(in_one_batch(fresh, producing=version + 1))
            step.apply(result, learning_rates=[0.05])
    return step, predicted


@pytest.mark.parametrize("budget", [1, 1000])
def test_old_logprobs_of_each_turn_use_the_weights_that_sampled_the_turn(trainer, budget):
    step, _ = warmed_up(trainer, steps=2)
    history = step.passes.history
    assert history is not None
    spans = ([(0, 3)], [(0, 1), (1, 2)], [(2, 4)], [(1, 2)])
    turns = [sampled(seed, its).turns[0] for seed, its in enumerate(spans)]
    forked = replace(sampled(1, [(0, 5)]), turns=tuple(turns), parents=(ROOT, 0, 0, ROOT))
    batch = in_one_batch([replace(group(0), rollouts=(forked, sampled(2, [(1, 4)], reward=0.0)))], budget=budget)
    result = step.accumulate(batch)
    compared = 0
    for made in result.batch.micro_batches:
        assert made.old_logprobs is not None and made.behavior_versions is not None
        for version in range(3):
            its = made.loss_mask & (made.behavior_versions == version)
            (expected,) = trainer.forward_at([made], history.weights(version))
            np.testing.assert_allclose(made.old_logprobs[its], expected[its], rtol=0, atol=2e-6)
            compared += int(its.sum())
        assert not made.old_logprobs[~made.loss_mask].any()
    assert compared == 12 + 4, "each sampled token once"


@pytest.mark.parametrize("trainer", ["torch"], indirect=True)  # the bigram trainer samples with rounded weights
def test_old_logprobs_in_lockstep_are_bit_identical_to_those_of_the_gradient_pass(trainer):
    """The recomputation and the gradient pass must use the same forward graph and weights."""
    step, _ = warmed_up(trainer, steps=2)
    fresh = [replace(group(0), rollouts=tuple(sampled(seed, [(2, 3 + seed)], reward=seed % 2) for seed in range(6)))]
    result = step.accumulate(in_one_batch(fresh))
    for made, loss in zip(result.batch.micro_batches, result.first.losses, strict=True):
        assert made.old_logprobs is not None
        assert made.old_logprobs[made.loss_mask].tobytes() == loss.predictions[made.loss_mask].tobytes()


class Counting:
    """A bigram trainer that records the number of tokens of each forward pass with weights of an earlier version."""

    def __init__(self, trainer):
        self.worker = trainer
        self.tokens = []

    def __getattr__(self, name):
        return getattr(self.worker, name)

    def forward_at(self, micro_batches, weights):
        self.tokens.append(sum(batch.num_tokens for batch in micro_batches))
        return self.worker.forward_at(micro_batches, weights)


def test_forward_pass_of_each_version_covers_only_the_tokens_it_needs(trainer):
    """The pass for a version covers only rollouts with tokens of that version, up to its last token."""
    step, _ = warmed_up(trainer, steps=2)
    counting = Counting(trainer)
    replace(step.passes, policy=counting).completed(in_one_batch(mixed(), budget=20), {"old_logprobs"})
    third = 3 + 7 + 3  # tokens of the two-turn rollout before the sampled tokens of its second turn
    assert counting.tokens == [8 + 5 + third + 1, 8 + third + 5 + 7, third + 7 + 9]
