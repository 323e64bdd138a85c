"""One training step on real trainers: its forward passes, its advantages, and its gradient under any packing."""

from dataclasses import replace

import numpy as np
import pytest

from pipelinerl import rng
from pipelinerl.enums import NoSignal, OldLogprobs
from pipelinerl.objective import catalogue
from pipelinerl.objective.adv import GAE
from pipelinerl.objective.presets import resolve
from pipelinerl.objective.value_loss import ValueLoss
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.bigram.trainer import BigramTrainer
from pipelinerl.staleness import StalenessBounds
from pipelinerl.training.batch import BatchRules
from pipelinerl.training.passes import ForwardPasses
from pipelinerl.training.rollouts.admission import ConsumedLedger, Lineage, learns_from_equals, teacher
from pipelinerl.training.rollouts.batcher import Batcher, StepBudget
from pipelinerl.training.step import Critic
from pipelinerl.types import Outcome
from tests.fakes.batches import batch_of, step_on
from tests.fakes.rollouts import group, rollout
from trainer_contract.types import Head, OptimizerSpec, TrainerSpec

VOCAB = 7
PPO = {"preset": "ppo", "adv": {"kl": 0.1}, "grad2": "kl", "grad1": {"over": "old"}}
PRESETS = ["ppo", PPO, "grpo", "grpo_kl", "gspo", "gmpo", "ppo_tis", "dapo", "reinforce_plus_plus", "decoupled_ppo"]


def two_turns(draw, reward):
    turns = []
    for _ in range(2):
        one = rollout(
            prompt=draw.integers(0, VOCAB, 2).tolist(),
            sampled=draw.integers(0, VOCAB, int(draw.integers(1, 5))).tolist(),
            logprob=-float(draw.uniform(1, 3)),
        )
        turns += one.turns
    return replace(rollout(reward=reward), turns=tuple(turns))


def groups():
    draw = rng.generator(5, "step")
    made = [
        replace(group(index), rollouts=tuple(two_turns(draw, reward) for reward in rewards))
        for index, rewards in enumerate([(0.0, 1.0, 1.0), (1.0, 1.0, 1.0), (0.0, 0.5, 1.0)])
    ]
    unjudged = replace(rollout(sampled=[1, 2, 3]), verdict=replace(rollout().verdict, outcome=Outcome.TIMEOUT))
    return [*made, replace(group(3), rollouts=(two_turns(draw, 1.0), unjudged, two_turns(draw, 0.0)))]


class Counting:
    def __init__(self, spec):
        self.worker = BigramTrainer()
        self.worker.init_worker(spec)
        self.forwards = 0

    def __getattr__(self, name):
        return getattr(self.worker, name)

    def forward(self, micro_batches):
        self.forwards += len(micro_batches)
        return self.worker.forward(micro_batches)


@pytest.fixture
def spec(tmp_path):
    BigramModel.random(VOCAB, seed=4).save(tmp_path / "model")
    return TrainerSpec(model_path=tmp_path / "model", optimizer=OptimizerSpec(eps=1.0, grad_clip=0.0))


def practised_critic(spec, *, warmup_steps=0):
    """Return a critic that has been trained a little, so that its values are not zero."""
    worker = Counting(replace(spec, head=Head.VALUE))
    worker.worker._state.table = rng.generator(8, "values").normal(size=VOCAB)
    return Critic(worker=worker, loss=ValueLoss(), learning_rate=0.1, warmup_steps=warmup_steps)


def step_of(spec, *, warmup_steps=0, old=OldLogprobs.RECOMPUTE):
    """Return a train step whose policy, critic and reference have different weights."""
    other = spec.model_path.with_name("reference")
    BigramModel.random(VOCAB, seed=9).save(other)
    critic = practised_critic(spec, warmup_steps=warmup_steps)
    reference = Counting(replace(spec, model_path=other))
    policy = Counting(spec)
    passes = ForwardPasses(policy=policy, critic=critic.worker, reference=reference, old_logprobs=old)
    return step_on(passes, critic=critic)


def without_critic(step):
    return step_on(replace(step.passes, critic=None))


def fitting(step, objective):
    return step if "values" in objective.passes else without_critic(step)


def accumulated(step, objective, *, budget, of, producing=1):
    batch = batch_of(of, objective, producing=producing, token_budget=budget)
    return step.accumulate(batch)


def weights(worker):
    assert worker is not None
    ((_, table),) = worker.gather_weights()
    return np.array(table)


@pytest.mark.parametrize("choice", PRESETS, ids=str)
def test_packing_splitting_and_order_of_rollouts_do_not_change_the_step(choice, spec):
    objective = resolve(choice)

    def stepped(budget, of):
        step = fitting(step_of(spec), objective)
        made = accumulated(step, objective, budget=budget, of=of)
        figures = step.apply(made, learning_rates=[0.1]).figures
        tables = [weights(worker) for worker in (step.passes.policy, step.critic and step.critic.worker) if worker]
        return tables, figures["grad_norm"], len(made.batch.micro_batches)

    expected, norm, _ = stepped(1000, groups())
    assert norm > 1e-4
    for budget, of in ((1, groups()), (30, groups()), (30, groups()[::-1])):
        tables, its_norm, parts = stepped(budget, of)
        assert parts > 1 and its_norm == pytest.approx(norm, rel=1e-6)
        for table, wanted in zip(tables, expected, strict=True):
            np.testing.assert_allclose(table, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", catalogue.PRESETS)
def test_batch_of_equal_rewards_has_zero_gradient_unless_the_objective_learns_from_equal_rewards(name, spec):
    """Objectives that also learn from equal rewards, such as those with a critic or a KL penalty, have a gradient."""
    objective = resolve(name, max_tokens=8)
    waiting = Batcher(
        ledger=ConsumedLedger(),
        lineage=Lineage(1, 0),
        no_signal=NoSignal.TRAIN,
        teaches=teacher(objective, BatchRules(token_budget=1)),
    )
    for index in range(2):
        waiting.offer(group(index, (1.0, 1.0)))
    taken = waiting.take(StepBudget(rollouts=4), producing=1, bounds=StalenessBounds(1, 1))
    assert taken is not None
    step = fitting(step_of(spec), objective)
    figures = step.apply(accumulated(step, objective, budget=1000, of=taken), learning_rates=[0.1]).figures
    assert np.isfinite(figures["grad_norm"])
    assert figures["grad_norm"] == pytest.approx(0.0, abs=1e-9) or learns_from_equals(objective, {})


@pytest.mark.parametrize("budget", [1, 25, 1000])
def test_gae_advantages_and_returns_equal_loops_over_tokens(budget, spec):
    """The loops compute each rollout separately, token by token, from the models' log-probs and values."""
    objective = replace(resolve(PPO), adv=GAE(kl=0.1))
    step = step_of(spec)
    batch = batch_of(groups(), objective, token_budget=budget)
    result = step.accumulate(batch)
    raw = []
    for packed, micro_batch in zip(batch.packed, result.batch.micro_batches, strict=True):
        ends = np.flatnonzero(np.diff(micro_batch.segment_ids, append=-1))
        for member, first, last in zip(packed.members, np.append(0, ends[:-1] + 1), ends + 1, strict=True):
            inside = slice(first, last)
            mask = micro_batch.loss_mask[inside]
            value, old, ref = (
                getattr(micro_batch, name)[inside][mask].astype(float)
                for name in ("values", "old_logprobs", "ref_logprobs")
            )
            reward = [r for g in groups() for r in g.rollouts][member].verdict.reward
            advantage, following, total = np.zeros(len(value)), 0.0, 0.0
            for t in reversed(range(len(value))):
                earned = (reward if t == len(value) - 1 else 0.0) - 0.1 * (old[t] - ref[t])
                total = earned + following - value[t] + 0.95 * total
                advantage[t], following = total, value[t]
            np.testing.assert_allclose(micro_batch.returns[inside][mask], advantage + value, atol=1e-6)
            raw.append(np.stack((advantage, micro_batch.advantages[inside][mask])))
    plain, whitened = np.concatenate(raw, axis=1)
    np.testing.assert_allclose(whitened, (plain - plain.mean()) / (plain.std() + 1e-8), atol=1e-5)


@pytest.mark.parametrize(
    ("choice", "old", "expected"),
    [
        ("grpo", OldLogprobs.RECOMPUTE, (0, 0, 0)),
        ("ppo_recomputed", OldLogprobs.RECOMPUTE, (1, 0, 0)),
        ("ppo_recomputed", OldLogprobs.BEHAVIOR, (0, 0, 0)),
        ("grpo_kl", OldLogprobs.RECOMPUTE, (0, 0, 1)),
        ("ppo", OldLogprobs.RECOMPUTE, (0, 1, 0)),
        (PPO, OldLogprobs.RECOMPUTE, (1, 1, 1)),
    ],
    ids=str,
)
def test_step_makes_only_the_forward_passes_that_its_objective_needs(choice, old, expected, spec):
    objective = resolve(choice)
    step = step_of(spec, old=old)
    made = accumulated(fitting(step, objective), objective, budget=1000, of=groups())
    workers = [step.passes.policy, step.passes.critic, step.passes.reference]
    assert tuple(worker.forwards for worker in workers) == expected
    if old is OldLogprobs.BEHAVIOR:
        assert made.batch.micro_batches[0].old_logprobs is made.batch.micro_batches[0].behavior_logprobs


def test_policy_is_frozen_during_critic_warmup(spec):
    step, objective = step_of(spec, warmup_steps=2), resolve("ppo")
    assert step.critic is not None
    for version in (1, 2, 3):
        before = weights(step.passes.policy), weights(step.critic.worker)
        made = accumulated(step, objective, budget=30, of=groups(), producing=version)
        figures = step.apply(made, learning_rates=[0.1]).figures
        assert step.passes.policy.model_version == version
        stands = np.array_equal(weights(step.passes.policy), before[0])
        assert (stands, figures["learning_rate"]) == ((True, 0.0) if version <= 2 else (False, 0.1))
        assert not np.array_equal(weights(step.critic.worker), before[1])
        assert figures["value_loss"] > 0 and figures["value_grad_norm"] > 0
