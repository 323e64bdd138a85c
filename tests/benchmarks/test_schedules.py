"""Arms of the schedules benchmark differ in their schedule alone, with as many rollouts and optimizer steps."""

from __future__ import annotations

import pytest

from benchmarks.schedules import RECIPE, Cell, Schedule, cells, schedules
from pipelinerl.config.recipe import RunConfig, load
from pipelinerl.roles.wiring import mini_batching_of, objective_of

CELLS = cells(quick=False, recipe=RECIPE)


def config_of(schedule: Schedule, cell: Cell) -> RunConfig:
    return load(RECIPE, [*cell.changes, *schedule.changes(cell)])


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_every_arm_has_as_many_rollouts_and_optimizer_steps(cell: Cell) -> None:
    for config in (config_of(schedule, cell) for schedule in schedules()):
        assert config.run.steps * config.training.rollouts_per_step == cell.rollouts * cell.optimizer_steps
        assert config.optimizer_steps == cell.optimizer_steps
        assert config.training.rollouts_per_step == cell.rollouts * mini_batching_of(config).mini_batches


def test_arms_differ_in_their_schedule_alone() -> None:
    plain = load(RECIPE, list(CELLS[0].changes))
    theirs = ("staleness", "training", "run", "evaluation", "checkpoint", "actor", "launch")
    for schedule in schedules():
        config = config_of(schedule, CELLS[0])
        engine = config.engine.model_copy(update={"on_update": plain.engine.on_update})
        same = {name: getattr(plain, name) for name in theirs} | {"engine": engine}
        assert config.model_copy(update=same) == plain, schedule.name
        assert objective_of(config) == objective_of(plain)


def test_the_grid_is_of_both_laws_of_length() -> None:
    assert {cell.lengths for cell in CELLS} == {"fixed", "heavy-tailed"}
    assert len({schedule.name for schedule in schedules()}) == 8
