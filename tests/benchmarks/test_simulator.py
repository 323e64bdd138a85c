"""The simulator benchmark compares runs that differ only in their schedule, and its slowed-down recipe loads."""

import pytest

from benchmarks.paced import paced_recipe
from benchmarks.simulator import ARMS, changes_of
from pipelinerl.config.recipe import load


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
