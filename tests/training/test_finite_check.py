"""A step with non-finite values is skipped with an error that names their groups, and leaves the weights unchanged."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from pipelinerl.objective.grad2 import Regularizer
from pipelinerl.objective.presets import resolve
from pipelinerl.objective.value_loss import ValueLoss
from pipelinerl.training.batch import NonFiniteStep
from pipelinerl.training.passes import ForwardPasses
from pipelinerl.training.step import Critic
from tests.fakes.batches import batch_of, bigram, step_on
from tests.fakes.rollouts import group, rollout
from trainer_contract.errors import NonFiniteError, ProtocolError
from trainer_contract.types import Head

VOCAB = 7
POISONED = 6


@pytest.fixture
def worker(tmp_path):
    return partial(bigram, tmp_path / "model", vocab=VOCAB)


def groups(*, reward=1.0, logprob=-1.5):
    """Return three groups; the given values apply to one rollout of the middle group, which has index 6."""
    bad = replace(
        group(POISONED), rollouts=(rollout(reward=reward, logprob=logprob), rollout(reward=0.0, sampled=[5, 6, 1]))
    )
    return [group(4), bad, group(9)]


@contextmanager
def refused(what, groups):
    """Assert that the `with` block raises `NonFiniteStep` for the cause `what` and these groups."""
    with pytest.raises(NonFiniteStep) as caught:
        yield
    assert (caught.value.what, caught.value.groups) == (what, groups)


class Overflowing(Regularizer):
    """A loss term whose value is finite but whose gradient is not."""

    formula = ""

    def value(self, tokens):
        return tokens.logprobs * 0

    def pullback(self, tokens, cotangent):
        return np.where(tokens.advantages > 0.9, np.inf, 0.0)


@pytest.mark.parametrize("budget", [1, 1000])
@pytest.mark.parametrize(
    ("what", "poisoned"),
    [
        ("rewards", {"reward": float("nan")}),
        ("rewards", {"reward": float("inf")}),
        ("behavior_logprobs", {"logprob": float("nan")}),
        ("behavior_logprobs", {"logprob": float("-inf")}),
        ("is_weight", {"logprob": -120.0}),
    ],
    ids=["a reward of NaN", "an infinite reward", "a log-prob of NaN", "an infinite log-prob", "a ratio overflows"],
)
def test_nonfinite_reward_logprob_or_ratio_skips_the_step_and_names_its_group(what, poisoned, budget, worker):
    policy = worker()
    step, objective = step_on(ForwardPasses(policy=in_fp32(policy))), resolve("pipelinerl")
    batch = batch_of(groups(**poisoned), objective, token_budget=budget)
    with refused(what, [POISONED]):
        step.accumulate(batch)
    with pytest.raises(ProtocolError):
        policy.optimizer_step(learning_rate=0.1)
    sound = batch_of(groups(), objective, token_budget=budget)
    step.apply(step.accumulate(sound), learning_rates=[0.1])
    assert policy.model_version == 1, "training goes on"


@pytest.mark.parametrize(
    "adv", [{"scale": "none"}, {"kind": "reward_to_go", "kl": 0.1}], ids=["group relative", "reward to go with KL"]
)
def test_advantage_that_overflows_fp32_skips_the_step_and_names_its_group(adv, worker):
    objective = resolve({"preset": "grpo", "adv": adv})
    step = step_on(ForwardPasses(policy=worker(), reference=worker()))
    batch = batch_of(groups(reward=1e300), objective)
    with refused("advantages", [POISONED]):
        step.accumulate(batch)


def in_fp32(policy):
    """Wrap the float64 bigram trainer to reject values that overflow in fp32."""

    class Narrow:
        def __getattr__(self, name):
            return getattr(policy, name)

        def backward(self, micro_batches, objective):
            for number, micro_batch in enumerate(micro_batches):
                if (np.abs(micro_batch.behavior_logprobs) > 88).any():
                    raise NonFiniteError("the loss is inf", number=number)
            return policy.backward(micro_batches, objective)

    return Narrow()


def test_overflowing_gradient_skips_the_step_and_names_its_group(worker):
    step, objective = step_on(ForwardPasses(policy=worker())), replace(resolve("grpo"), grad2=Overflowing())
    before = worker()
    batch = batch_of(groups(), objective, token_budget=1)
    result = step.accumulate(batch)
    with np.errstate(all="ignore"), refused("loss gradient", [4]):
        step.apply(result, learning_rates=[0.1])
    assert step.passes.policy.model_version == 0
    ((_, table),), ((_, untouched),) = step.passes.policy.gather_weights(), before.gather_weights()
    np.testing.assert_array_equal(table, untouched)


@pytest.mark.parametrize(
    ("role", "what"), [("reference", "ref_logprobs"), ("critic", "values"), ("policy", "logprobs")]
)
def test_step_is_skipped_if_a_model_has_nan_weights_and_the_error_names_the_model(role, what, worker):
    models = {"policy": worker(), "reference": worker(), "critic": worker(head=Head.VALUE)}
    models[role]._state.table[:] = np.nan
    critic = Critic(worker=models["critic"], loss=ValueLoss(), learning_rate=0.1)
    step, objective = step_on(ForwardPasses(**models), critic=critic), resolve({"preset": "ppo", "grad2": "kl"})
    with refused(what, [4, POISONED, 9]):
        step.accumulate(batch_of(groups(), objective))


def test_nonfinite_gradient_of_the_critic_leaves_policy_and_critic_unchanged(worker):
    policy, values = worker(), worker(head=Head.VALUE)
    critic = Critic(worker=values, loss=ValueLoss(), learning_rate=0.1)
    step = step_on(ForwardPasses(policy=policy, critic=values), critic=critic)
    objective = resolve("ppo")
    result = step.accumulate(batch_of(groups(), objective))
    values._state.gradient[0] = np.inf
    with refused("critic's gradient", [4, POISONED, 9]):
        step.apply(result, learning_rates=[0.1])
    assert (policy.model_version, values.model_version) == (0, 0)
    for each in (policy, values):
        with pytest.raises(ProtocolError):
            each.optimizer_step(learning_rate=0.1)
