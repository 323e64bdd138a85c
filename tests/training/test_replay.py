"""A replayed step is the recorded one to the bit, and one that was computed on something else is told apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from pipelinerl.errors import RecordError
from pipelinerl.models.bigram import BigramModel
from pipelinerl.objective.presets import resolve
from pipelinerl.trainers.bigram_trainer import BigramTrainer
from pipelinerl.training.adaptive import AdaptiveObjective
from pipelinerl.training.admission import Lineage
from pipelinerl.training.passes import Passes
from pipelinerl.training.replay import RecordedStep, Replay
from pipelinerl.training.step import TrainStep
from pipelinerl.types import RolloutGroup
from tests.fakes.rollouts import group
from trainer_contract.types import TrainerSpec

GROUPS = {index: [group(index, (0.0, 1.0, 0.5), version=index // 4)] for index in range(12)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    BigramModel.random(7, seed=4).save(tmp_path)
    return tmp_path


def replay(model: Path, groups: Mapping[int, Sequence[RolloutGroup]] = GROUPS) -> Replay:
    """From the run's beginning."""
    trainer = BigramTrainer()
    trainer.init_worker(TrainerSpec(model_path=model))
    objective = AdaptiveObjective(resolve("grpo"), controller=None)
    step = TrainStep(passes=Passes(policy=trainer))
    return Replay(step=step, objective=objective, groups=groups, token_budget=64, shaping={})


def recorded(model: Path) -> list[RecordedStep]:
    """Three steps of four groups, as a run would have reported them."""
    taking, steps = replay(model), []
    for version in (1, 2, 3):
        orders = range(4 * version - 4, 4 * version)
        blank = RecordedStep(
            version=version, lineage=Lineage(1, 0), orders=tuple(orders), figures={"learning_rate": 0.1 * version}
        )
        (taken,) = taking.run([blank])
        steps.append(replace(blank, figures=taken.figures))
    return steps


def test_it_is_the_same_to_the_bit(model: Path) -> None:
    again = list(replay(model).run(recorded(model)))
    assert [each.differences for each in again] == [{}, {}, {}]
    assert len({each.figures["loss"] for each in again}) == 3, "the steps are not all alike"


def test_other_weights_and_other_rewards_are_told_apart(model: Path) -> None:
    steps = recorded(model)
    hotter = replace(steps[0], figures={**steps[0].figures, "learning_rate": 0.1001})
    first, second, _ = replay(model).run([hotter, *steps[1:]])
    assert first.differences == {} and "loss" in second.differences
    wrong = {**GROUPS, 1: [group(1, (1.0, 1.0, 0.5))]}
    (found,) = replay(model, wrong).run(steps[:1])
    assert {"reward", "loss", "grad_norm"} <= found.differences.keys()


def test_of_two_copies_the_one_that_the_trainer_could_take_counts(model: Path) -> None:
    steps = [replace(step, lineage=Lineage(2, 0)) for step in recorded(model)]
    epoch_two = {index: [group(index, (0.0, 1.0, 0.5), version=index // 4, epoch=2)] for index in range(12)}
    abandoned = group(5, (1.0, 0.0, 0.0), version=1, epoch=1)
    again = replay(model, {**epoch_two, 5: [abandoned, *epoch_two[5]]})
    assert [each.differences for each in again.run(steps)] == [{}, {}, {}]


def test_another_objective_on_the_same_data(model: Path) -> None:
    steps = recorded(model)
    taking = replay(model)
    list(taking.run(steps[:2]))
    instead = taking.instead(steps[2], resolve("cispo"))
    assert instead.figures["reward"] == steps[2].figures["reward"]
    assert instead.figures["grad_norm"] != steps[2].figures["grad_norm"]


def test_what_is_missing_is_named(model: Path) -> None:
    steps = recorded(model)
    with pytest.raises(RecordError, match="the group of order 2, of step 1, is not in the streams any more"):
        list(replay(model, {index: kept for index, kept in GROUPS.items() if index != 2}).run(steps))
    with pytest.raises(RecordError, match="the step after version 0 is not recorded, the next is 2"):
        list(replay(model).run(steps[1:]))
