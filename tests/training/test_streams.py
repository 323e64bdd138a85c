"""A batch with several losses has the sum of the gradients that separate batches, one for each loss, would have."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pipelinerl import registry
from pipelinerl.config.recipe import MODELS, load
from pipelinerl.objective.presets import resolve
from pipelinerl.objective.streams import CROSS_ENTROPY, DomainLoss, DomainLosses, Loss
from pipelinerl.rng import generator
from pipelinerl.roles.problems import demonstrations_of
from pipelinerl.roles.wiring import losses_of, objective_of, setting_of
from pipelinerl.training.batch import BatchRules, MiniBatching
from pipelinerl.training.passes import ForwardPasses
from pipelinerl.training.rollouts.admission import signal_of, teacher
from pipelinerl.training.step import weighed_for_critic
from pipelinerl.types import Outcome
from tests.fakes.batches import batch_of, step_on
from tests.fakes.rollouts import group, rollout
from trainer_contract.host_weights import bytes_of
from trainer_contract.types import Device, MicroBatch, OptimizerSpec, TrainerSpec

#: Both epsilon and learning rate of AdamW: with this value, its first step changes each weight by its gradient.
LINEAR = 1e7
DISTILLATION = resolve("on_policy_distillation")
LOSSES = DomainLosses(
    {"rl": DomainLoss(Loss.RL, 2.0), "kl": DomainLoss(Loss.REF_KL, 0.25), "ce": DomainLoss(Loss.CE, 0.5)}
)


def mixed(draw, count=5):
    """Return `count` groups of random domains and lengths; every sampled token has a different id."""
    groups, token = [], 100
    for index in range(count):
        domain = ("rl", "kl", "ce")[index % 3 if index < 3 else int(draw.integers(3))]
        rollouts = []
        for _ in range(int(draw.integers(2, 4))):
            length = int(draw.integers(1, 6))
            rollouts.append(
                rollout(
                    reward=float(draw.integers(0, 2)),
                    prompt=[1] * int(draw.integers(1, 4)),
                    sampled=range(token, token + length),
                    logprob=-float(draw.uniform(0.2, 2.0)),
                    outcome=Outcome.TIMEOUT if draw.random() < 0.1 else None,
                )
            )
            token += length
        groups.append(replace(group(index), domain=domain, rollouts=tuple(rollouts)))
    return groups


def column(batch, number):
    """Return random log-probs [T] that depend only on each token's id and on `number`."""
    return np.array([-generator(number, "logprob", int(token)).exponential() for token in batch.token_ids], np.float32)


def by_token(objective, batches):
    """Return d loss / d log-prob by token id, for all tokens whose gradient is not zero."""
    made = {}
    for each in batches:
        given = replace(each, ref_logprobs=column(each, 1))
        columns = {name: getattr(given, name) for name in MicroBatch.__slots__}
        columns = {name: value for name, value in columns.items() if value is not None}
        gradient = objective.prediction_gradient(column(each, 0).astype(np.float64), columns)
        made |= {int(token): float(g) for token, g in zip(each.token_ids, gradient, strict=True) if g}
    return made


@pytest.mark.parametrize("choice", ["pipelinerl", "grpo", "dapo", "gspo", "reinforce_plus_plus"])
@given(seed=st.integers(0, 10**6), budget=st.sampled_from([8, 24, 1000]))
@settings(max_examples=25, deadline=None)
def test_gradient_of_a_batch_with_a_loss_per_domain_is_the_sum_over_separate_batches(choice, seed, budget):
    groups, objective = mixed(generator(seed, "streams")), resolve(choice)
    batch = batch_of(groups, objective, token_budget=budget, losses=LOSSES)
    together = by_token(LOSSES.objective(objective), batch.micro_batches)
    alone = {}
    for domain, each in (("rl", objective), ("kl", DISTILLATION), ("ce", CROSS_ENTROPY)):
        its = [one for one in groups if one.domain == domain]
        separate = batch_of(its, each).micro_batches
        alone |= {token: LOSSES.by_domain[domain].factor * g for token, g in by_token(each, separate).items()}
    assert together.keys() == alone.keys()
    np.testing.assert_allclose([together[token] for token in alone], list(alone.values()), rtol=1e-5, atol=1e-9)


def test_token_weights_of_each_loss_sum_to_the_configured_factor_in_every_mini_batch():
    groups = mixed(generator(3, "streams"), count=12)
    batch = batch_of(
        groups, "dapo", token_budget=16, losses=LOSSES, mini_batching=MiniBatching(epochs=2, mini_batches=3)
    )
    for part in batch.mini_batches():
        for loss in (Loss.REF_KL, Loss.CE):
            weights = [each.weights[each.streams == loss.code].sum() for each in part.micro_batches]
            present = any((each.streams == loss.code).any() for each in part.micro_batches)
            factor = {Loss.REF_KL: 0.25, Loss.CE: 0.5}[loss]
            assert sum(weights) == pytest.approx(factor if present else 0.0)


def trainer_of(kind, model="tiny_speller"):
    trainer = registry.load("trainer.type", registry.TRAINERS, kind)()
    optimizer = OptimizerSpec(eps=LINEAR, grad_clip=0.0)
    trainer.init_worker(TrainerSpec(model_path=MODELS / model, device=Device.CPU, optimizer=optimizer))
    return trainer


def spelled(domain, index):
    """Return a group of three random answers whose tokens are in the model's vocabulary."""
    draw = generator(index, "spelled")
    answers = [
        rollout(reward=reward, prompt=[3, 4], sampled=draw.integers(3, 20, 2 + index).tolist(), logprob=-2.0)
        for reward in (0.0, 1.0, 0.0)
    ]
    return replace(group(index), domain=domain, rollouts=tuple(answers))


def weights(trainer):
    return np.concatenate([bytes_of(array).view(np.float32) for _, array in trainer.gather_weights()])


def moved(kind, groups, losses, *, objective="pipelinerl", demonstrations=None):
    """Take one step on the groups; return the gradient, which is the change of the weights, and the step's metrics."""
    trainer, reference = trainer_of(kind), trainer_of(kind, "tiny_speller_heads32")
    before = weights(trainer)
    batch = batch_of(groups, objective, token_budget=24, losses=losses)
    step = step_on(ForwardPasses(policy=trainer, reference=reference), demonstrations=demonstrations)
    figures = step.apply(step.accumulate(batch), learning_rates=[LINEAR]).figures
    change = before - weights(trainer)
    trainer.close()
    reference.close()
    return change, figures


def imitated(kind, demonstrations):
    """Return the gradient of the mean cross-entropy of the first step's demonstrations."""
    trainer = trainer_of(kind)
    before = weights(trainer)
    trainer.backward(batch_of(demonstrations.groups(0), CROSS_ENTROPY, token_budget=64).micro_batches, CROSS_ENTROPY)
    trainer.optimizer_step(learning_rate=LINEAR)
    change = before - weights(trainer)
    trainer.close()
    return change


RECIPE = ['domains.short_words.loss="ce"', "domains.short_words.loss_weight=0.5"]


@pytest.mark.parametrize("kind", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_step_with_three_losses_adds_the_gradients_of_the_losses(kind):
    demonstrations = demonstrations_of(load("tiny", RECIPE))
    assert demonstrations is not None
    rl, kl = [spelled("rl", 0), spelled("rl", 1)], [spelled("kl", 2), spelled("kl", 3)]
    losses = DomainLosses({**LOSSES.by_domain, **losses_of(load("tiny", RECIPE)).by_domain})
    both, figures = moved(kind, [*rl, *kl], losses, demonstrations=demonstrations)
    alone, plain = moved(kind, rl, DomainLosses())
    distilled, other = moved(kind, kl, DomainLosses(), objective="on_policy_distillation")
    copied = imitated(kind, demonstrations)
    assert min(np.abs(each).max() for each in (alone, distilled, copied)) > 1e-3
    np.testing.assert_allclose(both, 2.0 * alone + 0.25 * distilled + 0.5 * copied, rtol=1e-4, atol=2e-6)
    assert figures["loss"] == pytest.approx(2.0 * plain["loss"] + 0.25 * other["loss"], rel=1e-4)
    assert figures["kl_teacher"] == pytest.approx(other["kl_reference"], rel=1e-5)
    assert 0.1 < figures["ce_loss"] < 5 and "kl_reference" not in figures and "ce_loss" not in plain


def test_critic_is_not_trained_on_tokens_of_losses_that_read_no_rewards():
    batch = batch_of([spelled("rl", 0), spelled("kl", 1)], "ppo", token_budget=64, losses=LOSSES)
    values = [np.zeros(each.num_tokens, np.float32) for each in batch.micro_batches]
    (completed,) = batch.with_columns({"values": values}).with_advantages().micro_batches
    assert completed.streams is not None and not completed.advantages[completed.streams == Loss.REF_KL.code].any()
    (weighed,) = weighed_for_critic([completed])
    rewarded = weighed.loss_mask & (completed.streams == Loss.RL.code)
    assert np.array_equal(weighed.loss_mask, rewarded) and weighed.weights.sum() == pytest.approx(1.0)


def test_group_with_equal_rewards_trains_if_the_loss_of_its_domain_reads_no_rewards():
    equal = replace(group(0, rewards=(0.0, 0.0)), domain="kl")
    for losses, expected in ((LOSSES, True), (DomainLosses(), False)):
        assert signal_of(resolve("grpo"), losses)(equal) is expected
        assert teacher(resolve("grpo"), BatchRules(token_budget=1, losses=losses))(equal) is expected
    batch = batch_of([equal], token_budget=64, losses=LOSSES)
    assert sum(each.weights.sum() for each in batch.micro_batches) == pytest.approx(0.25)


def test_demonstrations_depend_only_on_the_number_of_the_optimizer_step():
    first, again = (demonstrations_of(load("tiny", RECIPE)) for _ in range(2))
    assert first is not None and again is not None and first.count == 16, "half of the 32 groups that are sampled"
    assert [g.rollouts[0].turns[0].token_ids.tolist() for g in first.groups(3)] == [
        g.rollouts[0].turns[0].token_ids.tolist() for g in again.groups(3)
    ]
    assert [g.index for step in range(3) for g in first.groups(step)] == list(range(48)), "each problem once"
    assert {g.domain for g in first.groups(0)} == {"short_words"}
    assert sum(
        float(each.weights.sum())
        for each in first.micro_batches(0, BatchRules(token_budget=64, losses=losses_of(load("tiny", RECIPE))))
    ) == pytest.approx(0.5)
    none = replace(first, most_tokens=1)
    assert none.groups(0) == [] == none.micro_batches(0, BatchRules(token_budget=64)), "longer ones are left out"


def test_recipe_sets_the_loss_and_the_demonstrations_of_each_domain():
    assert demonstrations_of(load("tiny")) is None and losses_of(load("tiny")).others == ()
    config = load("tiny", [*RECIPE, 'domains.long_words.loss="ref_kl"', "domains.long_words.group_size=1"])
    assert losses_of(config).others == (Loss.CE, Loss.REF_KL) and losses_of(config).passes == {"ref_logprobs"}
    assert [each.name for each in config.trained_domains] == ["long_words"]
    assert not setting_of(config).group_sizes, "the objective compares no answers of this recipe"
    assert objective_of(load("tiny", ['domains.long_words.loss="ref_kl"', 'reference.path="shipped:tiny_speller"']))
