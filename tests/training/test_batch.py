"""Micro-batches built from rollout groups: their metrics, and rollouts that do not change the step if left out."""

from dataclasses import replace

import numpy as np
import pytest

from pipelinerl import rng
from pipelinerl.enums import Truncated
from pipelinerl.objective.adv import GroupRelative
from pipelinerl.objective.presets import PRESETS, resolve
from pipelinerl.objective.reward import RewardShaping, Scored
from pipelinerl.training.batch import BatchRules
from pipelinerl.training.packing import WeightedRollout, pack
from pipelinerl.training.rollouts.admission import teacher
from pipelinerl.types import Outcome, RewardPart
from tests.fakes.batches import batch_of, bigram, random_group
from tests.fakes.rollouts import group, rollout
from trainer_contract.types import OptimizerSpec


def ragged(index, rewards):
    return random_group(rng.generator(index, "batch"), index, rewards, prompt=(3, 4), sampled=(1, 6))


def timed_out(made, place):
    rollouts = list(made.rollouts)
    rollouts[place] = replace(rollouts[place], verdict=replace(rollouts[place].verdict, outcome=Outcome.TIMEOUT))
    return replace(made, rollouts=tuple(rollouts))


GROUPS = [
    ragged(0, [0.0, 1.0, 1.0]),
    ragged(1, [1.0, 1.0, 1.0]),
    ragged(2, [0.0, 0.0, 0.0]),
    timed_out(ragged(3, [1.0, 0.0, 0.0]), 1),
]


def step(path, micro_batches, objective):
    """Take one optimizer step on the micro-batches; return the loss, the new weights, and the gradient's norm."""
    trainer = bigram(path, optimizer=OptimizerSpec(grad_clip=0.0))
    needs_old = "old_logprobs" in objective.needs
    loss = 0.0
    for micro_batch in micro_batches:
        if needs_old:
            micro_batch = replace(micro_batch, old_logprobs=trainer.forward([micro_batch])[0])
        loss += trainer.backward([micro_batch], objective)[0].loss
    stats = trainer.optimizer_step(learning_rate=0.1)
    ((_, table),) = trainer.gather_weights()
    return loss, table, stats.grad_norm


@pytest.mark.parametrize(
    "name",
    [name for name in PRESETS if resolve(name).adv == GroupRelative() and resolve(name).zero_advantage_is_idle],
)
def test_leaving_out_rollouts_without_gradient_changes_neither_the_loss_nor_the_updated_weights(name, tmp_path):
    objective = resolve(name)
    lean = batch_of(GROUPS, objective)
    assert lean.stats["idle_fraction"] == 1 - 5 / 12
    rollouts = [r for g in GROUPS for r in g.rollouts]
    index = np.repeat(np.arange(4), 3)
    rewards = np.array([r.verdict.reward for r in rollouts])
    lengths = np.array([r.num_sampled_tokens for r in rollouts])
    valid = np.array([r.verdict.outcome.is_judgement for r in rollouts])
    advantages = objective.adv.advantages(Scored(rewards=rewards, groups=index, lengths=lengths, valid=valid), {})
    weights = objective.agg.token_weights(lengths=lengths, groups=index, valid=valid)
    packed_whole = pack(
        [
            WeightedRollout(rollout=r, advantages=a, token_weight=float(w))
            for r, a, w, keep in zip(
                rollouts, np.split(advantages, np.cumsum(lengths)[:-1]), weights, valid, strict=True
            )
            if keep
        ],
        token_budget=1000,
    )
    whole = [packed.micro_batch for packed in packed_whole]
    assert sum(m.num_tokens for m in whole) > sum(m.num_tokens for m in lean.micro_batches)
    (loss, table, norm), (whole_loss, whole_table, whole_norm) = (
        step(tmp_path, batches, objective) for batches in (lean.micro_batches, whole)
    )
    assert norm > 1e-5
    assert (loss, norm) == pytest.approx((whole_loss, whole_norm), rel=1e-6, abs=1e-7)
    np.testing.assert_allclose(table, whole_table, rtol=0, atol=1e-6)


def test_objective_with_a_kl_penalty_trains_on_rollouts_whose_advantage_is_zero():
    """A KL penalty has a gradient for tokens whose advantage is zero too."""
    penalised = resolve({"preset": "grpo", "grad2": "kl"})
    assert not penalised.zero_advantage_is_idle
    batch = batch_of(GROUPS, penalised)
    assert batch.stats["idle_fraction"] == pytest.approx(1 - 11 / 12), "all but the one that was not judged"


def test_batch_metrics_match_precomputed_values():
    groups = [
        replace(
            group(0),
            rollouts=(
                rollout(reward=1.0, prompt=[1, 2], sampled=[3], version=4),
                rollout(reward=0.0, prompt=[1, 2], sampled=[3, 4, 5], spans=[(2, 1), (4, 2)]),
                rollout(reward=0.0, prompt=[1, 2], sampled=[3, 4], version=3, outcome=Outcome.VERIFIER_ERROR),
            ),
        )
    ]
    stats = batch_of(groups, producing=5).stats
    assert stats == {
        "rollouts": 3.0,
        "reward": 0.5,
        "tokens": 12.0,
        "sampled_tokens": 6.0,
        "length_mean": 2.0,
        "length_p95": pytest.approx(2.9),
        "length_max": 3.0,
        "accuracy": 0.5,
        "truncated": 0.0,
        "masked": 0.0,
        "staleness_mean": 2.0,
        "staleness_max": 3.0,
        "lag_rms": pytest.approx((5 / 3) ** 0.5),
        "mixed_version_fraction": pytest.approx(1 / 3),
        "unjudged": 1.0,
        "sampled_version": pytest.approx((4 + 10 / 3) / 2),
        "idle_fraction": pytest.approx(1 / 3),
    }


def test_rewards_are_shaped_with_the_settings_of_the_domain_of_their_group():
    groups = [replace(ragged(0, [0.0, 1.0]), domain="a"), replace(ragged(1, [0.0, 1.0]), domain="b")]
    shaping = {"b": RewardShaping(scale=2.0, high=0.5), "elsewhere": RewardShaping(scale=9.0)}
    batch = batch_of(groups, shaping=shaping)
    assert batch.scored.rewards.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert batch.stats["reward"] == 0.5, "what is reported is the verifier's"
    halved = {"b": RewardShaping(scale=0.5)}
    batch = batch_of(groups, shaping=halved)
    assert batch.scored.rewards.tolist() == [0.0, 1.0, 0.0, 0.5]


def with_parts(index, *parts):
    """Return a group whose verdicts have the reward parts `right` and `short`, and the reward 2·right − short."""
    made = ragged(index, [2 * right - short for right, short in parts])
    rollouts = [
        replace(one, verdict=replace(one.verdict, parts=(RewardPart("right", right), RewardPart("short", short))))
        for one, (right, short) in zip(made.rollouts, parts, strict=True)
    ]
    return replace(made, rollouts=tuple(rollouts))


def test_gdpo_advantages_weight_the_reward_parts_as_the_domains_recipe_says():
    group_of_equals = with_parts(0, (1.0, 1.0), (0.0, -1.0))
    shaping = {"test": RewardShaping(part_weights=(("right", 2.0), ("short", -1.0)))}
    batch = batch_of([group_of_equals], "gdpo", shaping=shaping)
    assert group_of_equals.rollouts[0].verdict.reward == group_of_equals.rollouts[1].verdict.reward == 1.0
    scored = batch.scored.parts
    assert scored is not None and scored.weights.tolist() == [[2.0, -1.0], [2.0, -1.0]]
    advantages = resolve("gdpo").adv.advantages(batch.scored, {})
    assert advantages[0] == pytest.approx(1.0, abs=1e-5) and advantages[-1] == pytest.approx(-1.0, abs=1e-5)
    gdpo, grpo = (teacher(resolve(name), BatchRules(token_budget=1, shaping=shaping)) for name in ("gdpo", "grpo"))
    assert gdpo(group_of_equals) and not grpo(group_of_equals), "the parts differ"
    assert not gdpo(with_parts(1, (1.0, 1.0), (1.0, 1.0)))
    plain = batch_of([group_of_equals], "gdpo")
    assert not plain.packed[0].micro_batch.advantages.any(), "without weights the reward is one part"


def cut_off(reward, tokens=2):
    return replace(rollout(reward=reward, sampled=[3] * tokens), finish_reason="length")


def test_truncated_rollout_in_mask_mode_does_not_train_but_counts_in_the_groups_mean_reward():
    groups = [replace(group(0), rollouts=(rollout(reward=1.0), rollout(reward=0.0), cut_off(0.0), cut_off(0.0)))]
    objective = resolve({"preset": "pipelinerl", "adv": {"scale": "none"}})
    trained, masked = (batch_of(groups, objective, truncated=how) for how in (Truncated.TRAIN, Truncated.MASK))
    assert sum(len(packed.members) for packed in trained.packed) == 4
    assert [packed.members for packed in masked.packed] == [[0, 1]]
    assert masked.learns.tolist() == [True, True, False, False]
    (batch,) = masked.micro_batches
    assert batch.advantages[batch.loss_mask] == pytest.approx([0.75, 0.75, -0.25, -0.25]), "the mean of all four"
    (whole,) = trained.micro_batches
    assert batch.weights[batch.loss_mask] == pytest.approx(2 * whole.weights[whole.loss_mask][:4]), "of two"
    assert (trained.stats["masked"], masked.stats["masked"]) == (0.0, 0.5)
    assert masked.stats["truncated"] == trained.stats["truncated"] == 0.5, "what is masked is counted all the same"
    critics = batch_of(groups, "ppo", truncated=Truncated.MASK)
    assert critics.scored.valid.tolist() == [True, True, False, False], "it gets no forward pass"
    only = batch_of([replace(group(0), rollouts=(cut_off(1.0), cut_off(0.0)))], truncated=Truncated.MASK)
    assert not only.micro_batches[0].weights.any() and only.micro_batches[0].loss_mask.any()


@pytest.mark.parametrize(
    ("rollouts", "truncated", "teaches"),
    [
        ((rollout(reward=1.0), cut_off(0.0)), Truncated.MASK, True),
        ((cut_off(1.0), cut_off(0.0)), Truncated.TRAIN, True),
        ((cut_off(1.0), cut_off(0.0)), Truncated.MASK, False),
        ((cut_off(1.0), cut_off(0.0), rollout(outcome=Outcome.TIMEOUT)), Truncated.MASK, False),
        ((rollout(reward=0.0), cut_off(0.0)), Truncated.MASK, False),
    ],
)
def test_group_trains_only_if_an_unmasked_rollout_has_a_nonzero_advantage(rollouts, truncated, teaches):
    teacher_of = teacher(resolve("grpo"), BatchRules(token_budget=1, truncated=truncated))
    assert teacher_of(replace(group(0), rollouts=rollouts)) is teaches
