"""Batches with several optimizer steps give the results of a plain PPO loop on every backend, and can end early."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from pipelinerl import rng
from pipelinerl.enums import OldLogprobs
from pipelinerl.objective.presets import resolve
from pipelinerl.objective.value_loss import ValueLoss
from pipelinerl.plugins.jax.trainer.trainer import JaxTrainer
from pipelinerl.plugins.warmstart.tiny_decoder import DecoderShape, random_decoder
from pipelinerl.trainers.torch.trainer import TorchTrainer
from pipelinerl.training.batch import MiniBatching, NonFiniteStep
from pipelinerl.training.passes import ForwardPasses
from pipelinerl.training.schedule import LearningRateSchedule
from pipelinerl.training.step import Critic
from tests.fakes.batches import batch_of, bigram, random_group, step_on
from trainer_contract.errors import NonFiniteError, ProtocolError
from trainer_contract.trainer import Trainer
from trainer_contract.types import Device, Head, OptimizerSpec, TrainerSpec

VOCAB, EPSILON, BATCHES = 24, 0.02, 3
DEALING = MiniBatching(epochs=2, mini_batches=3, seed=11)
OBJECTIVE = resolve(
    {
        "preset": "grpo",
        "adv": {"scale": "none"},
        "grad1": {"over": "old", "epsilon_low": EPSILON, "epsilon_high": EPSILON},
    }
)
#: With a large eps, AdamW does not amplify rounding errors of small gradients.
OPTIMIZER = OptimizerSpec(betas=(0.9, 0.95), eps=1e-3, grad_clip=0.5)
#: The learning rates of a batch's optimizer steps, all different.
RATES = [1e-2 / (1 + n) for n in range(DEALING.updates)]


def groups_of(number):
    """Return seven groups of three rollouts of different lengths; one group has equal rewards.

    Token 0 does not occur, because torch pads with it.
    """
    draw = rng.generator(number, "epochs")
    rewards = [(1.0, 1.0, 1.0) if index == 4 else (0.0, 1.0, float(draw.uniform())) for index in range(7)]
    return [
        random_group(draw, index, each, tokens=(1, VOCAB), logprob=(0.5, 0.5)) for index, each in enumerate(rewards)
    ]


# --- Schulman et al. 2017, Algorithm 1, rollout by rollout ------------------------------------------------------------

LogProbs = Callable[[list[int], list[int]], torch.Tensor]


def oracle(logprobs, parameters):
    """Train with a plain PPO loop; return (loss without clipped tokens, gradient norm) of each optimizer step."""
    optimizer = torch.optim.AdamW(
        parameters, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, weight_decay=OPTIMIZER.weight_decay
    )
    results = []
    for number in range(1, BATCHES + 1):
        groups = groups_of(number)
        rollouts = [
            [(r.turns[0].context_token_ids.tolist(), r.turns[0].token_ids.tolist()) for r in g.rollouts] for g in groups
        ]
        rewards = [[r.verdict.reward for r in g.rollouts] for g in groups]
        advantages = [[reward - sum(each) / len(each) for reward in each] for each in rewards]
        with torch.no_grad():  # π_old is computed once, before the batch's first optimizer step
            old = [[logprobs(*one) for one in members] for members in rollouts]
        sizes = [0 if i == 4 else sum(len(p) + len(s) for p, s in rollouts[i]) for i in range(7)]
        rates = iter(RATES)
        for epoch in range(DEALING.epochs):
            for part in DEALING.dealt(sizes, producing=number, epoch=epoch):
                loss, unclipped = torch.zeros((), dtype=parameters[0].dtype), 0.0
                for i in part:
                    for one, before, advantage in zip(rollouts[i], old[i], advantages[i], strict=True):
                        ratio = (logprobs(*one) - before).exp()
                        clipped = ratio.clamp(1 - EPSILON, 1 + EPSILON)
                        surrogate = torch.minimum(ratio * advantage, clipped * advantage)
                        loss = loss - surrogate.mean() / (3 * len(part))
                        its = ratio.detach() * advantage
                        unclipped -= float((its * (its <= surrogate.detach())).mean()) / (3 * len(part))
                optimizer.zero_grad()
                loss.backward()
                norm = float(torch.nn.utils.clip_grad_norm_(parameters, OPTIMIZER.grad_clip))
                optimizer.param_groups[0]["lr"] = next(rates)
                optimizer.step()
                results.append((unclipped, norm))
    return results


@dataclass
class Subject:
    """A trainer, and the log-prob function and the parameters of the same model for the plain PPO loop."""

    trainer: Trainer
    logprobs: LogProbs
    parameters: dict[str, torch.nn.Parameter]


def of_bigram(path):
    trainer = bigram(path, vocab=VOCAB, optimizer=OPTIMIZER)
    ((name, table),) = trainer.gather_weights()
    logits = torch.nn.Parameter(torch.tensor(table, dtype=torch.float64))

    def logprobs(prompt, sampled):
        rows = torch.log_softmax(logits[[prompt[-1], *sampled[:-1]]], dim=-1)
        return rows[range(len(sampled)), sampled]

    return Subject(trainer, logprobs, {name: logits})


def of_decoder(path, trainer):
    shape = DecoderShape(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=24, vocab=VOCAB, max_positions=32)
    model = random_decoder(shape, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(5.0)
    model.save_pretrained(path)
    trainer.init_worker(TrainerSpec(model_path=path, device=Device.CPU, optimizer=OPTIMIZER))

    def logprobs(prompt, sampled):
        logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits.float(), dim=-1)[range(len(sampled)), sampled]

    return Subject(trainer, logprobs, dict(model.named_parameters()))


@pytest.fixture(params=["bigram", "torch", pytest.param("jax", marks=pytest.mark.slow)])
def subject(request, tmp_path):
    made = of_bigram(tmp_path) if request.param == "bigram" else None
    if made is None:
        made = of_decoder(tmp_path, TorchTrainer() if request.param == "torch" else JaxTrainer())
    yield made
    made.trainer.close()


def taken(step, number, objective=OBJECTIVE, **fields):
    """Train on batch `number`, which produces model version `number`."""
    mini_batching = fields.pop("mini_batching", DEALING)
    batch = batch_of(groups_of(number), objective, producing=number, token_budget=48, mini_batching=mini_batching)
    rates = fields.pop("learning_rates", RATES)[: mini_batching.updates]
    return step.apply(step.accumulate(batch), learning_rates=rates)


def test_epochs_of_mini_batches_give_the_same_results_as_a_plain_ppo_loop(subject):
    step, ours, clipped, kls = step_on(ForwardPasses(policy=subject.trainer)), [], [], []
    for number in range(1, BATCHES + 1):
        figures, updates = taken(step, number)
        assert [(u["epoch"], u["mini_batch"]) for u in updates] == [(e, m) for e in (1, 2) for m in (1, 2, 3)]
        assert [u["learning_rate"] for u in updates] == RATES
        ours += [(u["loss"], u["grad_norm"]) for u in updates]
        clipped += [u["clip_fraction"] for u in updates]
        kls += [u["kl_old"] for u in updates]
        assert figures["optimizer_steps"] == 6 and figures["ended_by_kl"] == 0
        assert figures["loss"] == pytest.approx(np.mean([u["loss"] for u in updates]))
    expected = oracle(subject.logprobs, list(subject.parameters.values()))
    (losses, norms), (its_losses, its_norms) = np.transpose(ours), np.transpose(expected)
    np.testing.assert_allclose(losses, its_losses, rtol=0, atol=1e-6)
    np.testing.assert_allclose(norms, its_norms, rtol=1e-5)
    weights = {name: np.asarray(array) for name, array in subject.trainer.gather_weights()}
    for name, parameter in subject.parameters.items():
        if name in weights:
            np.testing.assert_allclose(weights[name], parameter.detach().numpy(), rtol=0, atol=1e-6, err_msg=name)
    assert subject.trainer.model_version == 6 * BATCHES, "the contract counts optimizer steps"
    assert max(clipped[1:6]) > 0.1 and clipped[0] == 0.0, "clipping over old is real, once weights have moved"
    assert kls[0] < 1e-12 < 1e-6 < kls[5]


# --- end of a batch ------------------------------------------------------------------------------------------------


def bigram_step(path, trainer=None):
    return step_on(ForwardPasses(policy=trainer or of_bigram(path).trainer))


def test_batch_ends_early_once_the_kl_divergence_from_the_old_policy_exceeds_target_kl(tmp_path):
    free = taken(bigram_step(tmp_path), 1, learning_rates=[0.1] * 6).updates
    kls = [u["kl_old"] for u in free]
    peak = kls.index(max(kls))
    bound = (kls[peak] + max(kls[:peak])) / 2
    assert peak > 1 and bound < kls[peak]
    step = bigram_step(tmp_path)
    ended = taken(step, 1, mini_batching=replace(DEALING, target_kl=bound), learning_rates=[0.1] * 6)
    assert ended.updates == free[:peak]
    assert (ended.figures["optimizer_steps"], ended.figures["ended_by_kl"]) == (peak, 1)
    assert step.passes.policy.model_version == peak
    with pytest.raises(ProtocolError):  # no gradient was left behind
        step.passes.policy.optimizer_step(learning_rate=0.1)
    again = taken(step, 2, mini_batching=replace(DEALING, target_kl=1e-12), learning_rates=[0.1] * 6)
    assert len(again.updates) == 1, "the first is always made"


def test_old_logprobs_are_computed_for_target_kl_even_if_the_objective_does_not_read_them(tmp_path):
    objective = resolve("pipelinerl")
    mini_batching = replace(DEALING, target_kl=1e9)
    assert "kl_old" in taken(bigram_step(tmp_path), 1, objective, mini_batching=mini_batching).updates[0]
    assert "kl_old" not in taken(bigram_step(tmp_path), 1, objective).updates[0]


def test_batch_ends_after_as_many_optimizer_steps_as_learning_rates_are_given(tmp_path):
    """A replay passes fewer learning rates than optimizer steps, to end a batch where the recorded run ended it."""
    assert len(taken(bigram_step(tmp_path), 1, learning_rates=[0.1] * 4).updates) == 4


class Breaking:
    """A bigram trainer whose gradient overflows at optimizer step `at`."""

    def __init__(self, inner, at):
        self._inner, self._at = inner, at

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def optimizer_step(self, *, learning_rate):
        if self._inner.model_version == self._at:
            self._inner.discard_gradient()
            raise NonFiniteError("the gradient's norm is inf")
        return self._inner.optimizer_step(learning_rate=learning_rate)


def test_nonfinite_gradient_ends_a_batch_early_or_skips_it_if_it_has_made_no_optimizer_step(tmp_path, caplog):
    inner = of_bigram(tmp_path).trainer
    broken = Breaking(inner, at=4)
    figures, updates = taken(bigram_step(tmp_path, broken), 1)
    assert (len(updates), figures["ended_not_finite"], figures["optimizer_steps"]) == (4, 1, 4)
    assert "step 1 ends after 4 optimizer steps: model's gradient of groups" in caplog.text
    before = next(iter(inner.gather_weights()))[1].copy()
    with pytest.raises(NonFiniteStep):
        taken(bigram_step(tmp_path, broken), 2)
    assert np.array_equal(next(iter(inner.gather_weights()))[1], before)


def test_critic_makes_one_optimizer_step_per_mini_batch(tmp_path):
    step, values = bigram_step(tmp_path), bigram(tmp_path, head=Head.VALUE, optimizer=OPTIMIZER)
    schedule = LearningRateSchedule(warmup_steps=12, steps=12, shape="constant", final_fraction=1.0)
    critic = Critic(worker=values, loss=ValueLoss(clip=1e-4), learning_rate=0.12, schedule=schedule, warmup_steps=1)
    step = step_on(replace(step.passes, critic=values), critic=critic)
    before = next(iter(step.passes.policy.gather_weights()))[1].copy()
    objective = resolve({"preset": "ppo", "grad1": {"over": "old"}})
    figures, updates = taken(step, 1, objective)
    assert np.array_equal(next(iter(step.passes.policy.gather_weights()))[1], before), "the policy stands still"
    assert values.model_version == 6 and figures["value_learning_rate"] == pytest.approx(0.06)
    assert figures["value_loss"] == pytest.approx(np.mean([u["value_loss"] for u in updates]))
    figures, updates = taken(step, 2, objective)
    assert not np.array_equal(next(iter(step.passes.policy.gather_weights()))[1], before)
    assert figures["value_learning_rate"] == pytest.approx(0.12)


def test_kl_from_the_old_policy_uses_behavior_logprobs_if_the_recipe_says_so(tmp_path):
    step = bigram_step(tmp_path)
    step = step_on(replace(step.passes, old_logprobs=OldLogprobs.BEHAVIOR))
    ended = taken(step, 1, mini_batching=replace(DEALING, target_kl=1e-3))
    assert len(ended.updates) == 1 and ended.updates[0]["kl_old"] > 1e-3, "the sampler said -0.5 of every token"
