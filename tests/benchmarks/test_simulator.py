"""The simulator benchmark compares runs that differ only in their schedule, and its slowed-down recipe loads."""

import pytest

from benchmarks.paced import ENGINE, TRAINER, paced_recipe
from benchmarks.simulator import ARMS, changes_of
from pipelinerl.config.recipe import load
from pipelinerl.plugins.simulation.from_recipe import setting_of
from pipelinerl.plugins.simulation.hardware import Hardware
from pipelinerl.plugins.simulation.setting import HeavyTailedLengths
from pipelinerl.plugins.simulation.simulator import simulate


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return paced_recipe(tmp_path_factory.mktemp("paced"))


def config_of(recipe, arm):
    return load(recipe, changes_of(arm, steps=40))


def test_runs_of_the_simulator_benchmark_differ_only_in_their_schedule(recipe):
    plain = load(recipe)
    for arm in ARMS:
        config = config_of(recipe, arm)
        engine = config.engine.model_copy(update={"on_update": plain.engine.on_update})
        same = {name: getattr(plain, name) for name in ("staleness", "training", "run", "actor")} | {"engine": engine}
        assert config.model_copy(update=same) == plain, arm
        assert config.training.rollouts_per_step == 64 * config.training.mini_batches


def test_simulator_ranks_schedules_by_speed_and_staleness_as_expected(recipe):
    predictions = {}
    for arm in ARMS:
        lengths = HeavyTailedLengths(12.0, 0.8, 48)
        setting = setting_of(config_of(recipe, arm), lengths=lengths, prompt_tokens=9, steps=40)
        predictions[arm] = simulate(setting, Hardware(engine=ENGINE, trainer=TRAINER))
    first, in_flight = predictions["conventional G = 1"], predictions["in flight"]
    assert first == predictions["conventional G = 1, again"]
    assert first.staleness == {1: 1.0}
    assert in_flight.step_s < 0.75 * first.step_s
    assert in_flight.step_s <= predictions["one step off"].step_s < first.step_s
    assert predictions["drain"].trainer_held >= in_flight.trainer_held
    assert predictions["RLAX (4, 8)"].staleness_mean > in_flight.staleness_mean > 1
    assert predictions["conventional G = 2"].tokens_per_s > first.tokens_per_s
