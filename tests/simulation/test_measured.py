"""Tests that a measured run is compared with simulations of as many steps."""

from __future__ import annotations

from dataclasses import replace

from inference_contract.weights import OnUpdate
from pipelinerl.simulation.hardware import EngineTimes, Hardware, TrainerTimes
from pipelinerl.simulation.lengths import HeavyTailedLengths
from pipelinerl.simulation.measured import DRAWS, simulated_like
from pipelinerl.simulation.simulator import simulate
from tests.simulation.recorded import run_events
from tests.simulation.settings import setting

PACED = Hardware(engine=EngineTimes(step_s=0.03, row_s=0.0005), trainer=TrainerTimes(token_s=0.001))
DRAIN = setting(1, 4, on_update=OnUpdate.DRAIN, lengths=HeavyTailedLengths(12.0, 0.9, 48), prompt_tokens=9, steps=200)


def test_simulated_drain_discards_no_groups_in_short_and_long_runs() -> None:
    assert simulate(DRAIN, PACED).discarded == 0.0
    like = simulated_like(run_events(steps=24), DRAIN, PACED)
    assert like.steps == 24 and like.discarded == 0.0


def test_comparable_prediction_is_the_median_of_several_simulations() -> None:
    found = simulated_like(run_events(steps=24), DRAIN, PACED)
    runs = [simulate(replace(DRAIN, steps=24, seed=seed), PACED) for seed in range(DRAWS)]
    assert (
        sum(run.step_s < found.step_s for run in runs) == DRAWS // 2 == sum(run.step_s > found.step_s for run in runs)
    )
