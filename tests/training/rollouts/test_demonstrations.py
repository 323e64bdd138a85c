"""Demonstrations beside rollouts: the sum of two gradients, each with its own denominator, the same after a resume."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipelinerl import registry
from pipelinerl.config.recipe import MODELS, load
from pipelinerl.errors import RecipeError
from pipelinerl.objective.presets import resolve
from pipelinerl.roles.wiring import demonstrations_of, objective_of
from pipelinerl.training.forward_passes import ForwardPasses
from pipelinerl.training.rollouts.batch import TrainBatch, build
from pipelinerl.training.rollouts.demonstrations import ImitationStream
from pipelinerl.training.train_step import TrainStep
from tests.fakes.rollouts import group, rollout
from trainer_contract.host_weights import bytes_of
from trainer_contract.trainer import Trainer
from trainer_contract.types import Device, OptimizerSpec, TrainerSpec

#: With this epsilon and rate the first step of AdamW moves each weight by its gradient.
LINEAR = 1e7


def demonstrations(count: int = 8, weight: float = 0.5) -> ImitationStream:
    config = load("tiny", [f"imitation.demonstrations={count}", f"imitation.weight={weight}"])
    made = demonstrations_of(config)
    assert made is not None
    return made


def batch() -> TrainBatch:
    answers = [rollout(reward=reward, sampled=[3, 4 + i, 5]) for i, reward in enumerate((0.0, 1.0, 0.0))]
    groups = [replace(group(0), rollouts=tuple(answers))]
    return build(groups, objective=resolve("pipelinerl"), token_budget=64, producing=1)


def trainer_of(kind: str) -> Trainer:
    trainer: Trainer = registry.load("trainer.type", registry.TRAINERS, kind)()
    trainer.init_worker(
        TrainerSpec(
            model_path=MODELS / "tiny_speller",
            device=Device.CPU,
            optimizer=OptimizerSpec(eps=LINEAR, grad_clip=0.0),
        )
    )
    return trainer


def moved(kind: str, imitation: ImitationStream | None, *, rl: float) -> tuple[np.ndarray, dict[str, float]]:
    """Return the gradient of one step, with the weights of its rollouts times `rl`, and the step's figures."""
    trainer = trainer_of(kind)

    def weights() -> np.ndarray:
        return np.concatenate([bytes_of(array).view(np.float32) for _, array in trainer.gather_weights()])

    before, made = weights(), batch()
    scaled = [replace(each, weights=each.weights * np.float32(rl)) for each in made.micro_batches]
    step = TrainStep(passes=ForwardPasses(policy=trainer), demonstrations=imitation)
    accumulated = step.accumulate(made.completed(scaled), resolve("pipelinerl"))
    figures = step.apply(accumulated, learning_rates=[LINEAR]).figures
    change = before - weights()
    trainer.close()
    return change, figures


@pytest.mark.parametrize("kind", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_gradient_beside_demonstrations_is_the_sum_of_both_with_own_denominators(kind: str) -> None:
    alone, plain = moved(kind, None, rl=1.0)
    imitated, figures = moved(kind, demonstrations(weight=1.0), rl=0.0)
    both, mixed = moved(kind, demonstrations(weight=0.5), rl=1.0)
    assert np.abs(alone).max() > 1e-3 and np.abs(imitated).max() > 1e-3
    np.testing.assert_allclose(both, alone + 0.5 * imitated, rtol=1e-5, atol=1e-6)
    assert mixed["imitation_loss"] == pytest.approx(figures["imitation_loss"]) and 0.1 < mixed["imitation_loss"] < 5
    assert mixed["loss"] == pytest.approx(plain["loss"]) and "imitation_loss" not in plain


def test_demonstrations_depend_on_the_number_of_the_optimizer_step_alone() -> None:
    first, again = demonstrations(), demonstrations()
    assert [g.rollouts[0].turns[0].token_ids.tolist() for g in first.groups(3)] == [
        g.rollouts[0].turns[0].token_ids.tolist() for g in again.groups(3)
    ]
    orders = [g.index for step in range(3) for g in first.groups(step)]
    assert orders == list(range(24)), "each problem once"
    weights = [float(each.weights.sum()) for each in first.micro_batches(0, width=1)]
    assert sum(weights) == pytest.approx(0.5)


def test_long_demonstrations_are_left_out() -> None:
    none = replace(demonstrations(), most_tokens=1)
    assert none.groups(0) == [] == none.micro_batches(0, width=1)


def test_recipe_imitates_only_known_domains(tmp_path: Path) -> None:
    only = demonstrations_of(load("tiny", ['imitation.domains=["long_words"]', "imitation.demonstrations=6"]))
    assert only is not None and {g.domain for g in only.groups(0)} == {"long_words"}
    assert demonstrations_of(load("tiny")) is None
    with pytest.raises(RecipeError, match=r"imitation\.domains: 'wrods' is no domain; expected any of long"):
        objective_of(load("tiny", ['imitation.domains=["wrods"]']))
