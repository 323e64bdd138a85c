"""Packing, splitting and order of rollouts change the gradient of a step in torch (fp32) only by rounding errors."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from pipelinerl import rng
from pipelinerl.objective.presets import resolve
from pipelinerl.objective.value_loss import ValueLoss
from pipelinerl.plugins.warmstart.tiny_decoder import DecoderShape, random_decoder
from pipelinerl.trainers.torch.trainer import TorchTrainer
from pipelinerl.training.passes import ForwardPasses
from pipelinerl.training.step import Critic
from tests.fakes.batches import batch_of, random_group, step_on
from trainer_contract.types import Device, Head, TrainerSpec

VOCAB = 24
PPO = {"preset": "ppo", "adv": {"kl": 0.1}, "grad1": {"over": "old"}, "grad2": "kl"}
#: `test_step.py` tries all presets with the bigram trainer; torch tries a token loss, a rollout term, and a critic.
CHOICES = [
    "grpo_kl",
    "gspo",
    PPO,
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("pipelinerl", "dapo", "gmpo", "ppo_tis", "decoupled_ppo")
    ),
]


def groups():
    draw, bounds = rng.generator(2, "torch_invariance"), {"tokens": (0, VOCAB), "prompt": (2, 8), "sampled": (1, 33)}
    rewards = [(0.0, 1.0, float(draw.uniform())) for _ in range(4)]
    return [random_group(draw, index, each, logprob=(2.5, 4.0), **bounds) for index, each in enumerate(rewards)]


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    """Return a train step with a policy, a critic after a few updates, and a reference with other weights."""
    shape = DecoderShape(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, vocab=VOCAB, max_positions=64)
    workers = []
    for seed, head in ((0, Head.POLICY), (1, Head.VALUE), (2, Head.POLICY)):
        path = tmp_path_factory.mktemp("model")
        random_decoder(shape, seed=seed).save_pretrained(path)
        workers.append(TorchTrainer())
        workers[-1].init_worker(TrainerSpec(model_path=path, device=Device.CPU, head=head))
    policy, critic, reference = workers
    nudged = rng.generator(3, "value_head").normal(scale=0.1, size=(1, 32))
    critic._worker.model.value_head.weight.data.copy_(torch.from_numpy(nudged))
    return step_on(
        ForwardPasses(policy=policy, critic=critic, reference=reference),
        critic=Critic(worker=critic, loss=ValueLoss(), learning_rate=0.1),
    )


def gradients(step, choice, *, budget, of):
    """Return the gradients of policy and critic by parameter name; clear the gradients in the models."""
    objective = resolve(choice)
    if "values" not in objective.passes:
        step = step_on(replace(step.passes, critic=None))
    step.accumulate(batch_of(of, objective, token_budget=budget))
    made = {}
    for role, worker in (("policy", step.passes.policy), ("critic", step.passes.critic)):
        if isinstance(worker, TorchTrainer):
            named = worker._worker.loaded.weights.items()
            made |= {f"{role} {name}": p.grad.clone() for name, p in named if p.grad is not None}
            worker.discard_gradient()
    return made


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_torch_gradient_is_invariant_to_packing_splitting_and_order(choice, step):
    of = partial(gradients, step, choice)
    expected = of(budget=10_000, of=groups())
    roles = {name.split()[0] for name in expected}
    scale = {role: max(g.abs().max() for name, g in expected.items() if name.startswith(role)) for role in roles}
    assert all(size > 1e-4 for size in scale.values())
    for got in (of(budget=1, of=groups()), of(budget=60, of=groups()), of(budget=60, of=groups()[::-1])):
        assert got.keys() == expected.keys()
        for name, gradient in got.items():
            tolerance = 1e-6 * max(1.0, float(scale[name.split()[0]]))
            np.testing.assert_allclose(gradient, expected[name], rtol=0, atol=tolerance, err_msg=name)
