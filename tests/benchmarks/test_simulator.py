"""Arms of the simulator's benchmark differ in their schedule alone, and the paced recipe is one that can be read."""

from __future__ import annotations

from math import exp
from pathlib import Path

import pytest

from benchmarks.paced import ENGINE, TRAINER, paced_recipe
from benchmarks.scale import GROUP, PACE, STEP
from benchmarks.simulator import ARMS, Bed, fleet, mocks
from pipelinerl.commands.simulation.from_recipe import setting_of
from pipelinerl.config.recipe import RunConfig, load
from pipelinerl.simulation.hardware import Hardware
from pipelinerl.simulation.lengths import HeavyTailedLengths
from pipelinerl.simulation.prediction import Prediction
from pipelinerl.simulation.simulator import simulate


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Bed:
    recipe = paced_recipe(tmp_path_factory.mktemp("paced"))
    return Bed(name="paced", recipe=str(recipe), rollouts=64, steps=40, calibrated_on=())


def config_of(bed: Bed, arm: str) -> RunConfig:
    return load(Path(bed.recipe), bed.of(arm))


def test_arms_differ_in_their_schedule_alone(bed: Bed) -> None:
    plain = load(Path(bed.recipe))
    for arm in ARMS:
        config = config_of(bed, arm)
        engine = config.engine.model_copy(update={"on_update": plain.engine.on_update})
        same = {name: getattr(plain, name) for name in ("staleness", "training", "run", "actor")} | {"engine": engine}
        assert config.model_copy(update=same) == plain, arm
        assert config.training.rollouts_per_step == 64 * config.training.mini_batches


def test_the_arms_are_schedules_apart(bed: Bed) -> None:
    """On the paced hardware alone, each is as fast and as stale as its name says."""
    found: dict[str, Prediction] = {}
    for arm in ARMS:
        setting = setting_of(config_of(bed, arm), lengths=HeavyTailedLengths(12.0, 0.8, 48), prompt_tokens=9, steps=40)
        found[arm] = simulate(setting, Hardware(engine=ENGINE, trainer=TRAINER))
    first, in_flight = found["conventional G = 1"], found["in flight"]
    assert first == found["conventional G = 1, again"]
    assert first.staleness == {1: 1.0}
    assert in_flight.step_s < 0.75 * first.step_s
    assert in_flight.step_s <= found["one step off"].step_s < first.step_s
    assert found["drain"].trainer_held >= in_flight.trainer_held
    assert found["RLAX (4, 8)"].staleness_mean > in_flight.staleness_mean > 1
    assert found["conventional G = 2"].tokens_per_s > first.tokens_per_s


def test_a_fleet_of_eight_times_the_engines_makes_almost_eight_times_the_tokens() -> None:
    """Where nothing but the engines decides, and actors and trainer grow with them."""
    first, last = fleet(steps=5, sizes=(16, 128))
    assert 7.0 < last["tokens_per_s"] / first["tokens_per_s"] < 9.0


def test_mock_engines_are_as_fast_as_their_answers_and_what_waits_for_a_step_allow() -> None:
    """A group holds its place until it has trained: of 128, half a step's worth waits for the rest of the step."""
    (found,) = mocks((128,))
    answer_s = PACE.median_s * exp(PACE.spread**2 / 2)
    assert found["rollouts_per_s"] == pytest.approx(GROUP * (128 - STEP / GROUP / 2) / answer_s, rel=0.05)
