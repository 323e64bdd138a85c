"""Calibration fits the simulation's durations to a run's events: it recovers the durations that made the events."""

from dataclasses import replace

import pytest

from inference_contract.weights import OnUpdate
from pipelinerl.errors import UserError
from pipelinerl.plugins.simulation.calibration import DRAWS, ObservedRun, calibrate, measure, simulated_like
from pipelinerl.plugins.simulation.hardware import (
    Contention,
    ControlTimes,
    EngineTimes,
    Hardware,
    TrainerTimes,
    UpdateTimes,
)
from pipelinerl.plugins.simulation.setting import FixedLengths, HeavyTailedLengths
from pipelinerl.plugins.simulation.simulator import simulate
from tests.plugins.simulation.recorded import run_events
from tests.plugins.simulation.settings import setting

ENGINE = EngineTimes(step_s=0.011, row_s=0.0002, prompt_token_s=3e-5)


def test_calibration_recovers_the_durations_from_which_the_events_were_made():
    """Engine times are fitted to the engine's counters, trainer times to token counts, all others to their events."""
    tokens = [1000 + 100 * (number % 10) for number in range(30)]
    events = run_events(engine=ENGINE, tokens_by_step=tokens, token_s=2e-4)
    fitted = calibrate([ObservedRun(events=events, setting=setting(1, 1))])
    assert fitted.engine.step_s == pytest.approx(ENGINE.step_s)
    assert fitted.engine.row_s == pytest.approx(ENGINE.row_s)
    assert fitted.engine.prompt_token_s == pytest.approx(ENGINE.prompt_token_s)
    assert fitted.trainer.token_s == pytest.approx(2e-4)
    assert fitted.trainer.optimizer_step_s == pytest.approx(0, abs=1e-6)
    assert fitted.update.send_s == pytest.approx(0.05)
    assert fitted.update.pause_s == pytest.approx(0.01)
    assert fitted.control.verify_s == pytest.approx(0.05, abs=1e-6)
    assert fitted.control.report_s == pytest.approx(0.02)


def test_calibration_attributes_step_time_that_nothing_else_explains_to_actors():
    """The fitted time that an actor spends on each rollout makes simulated steps as long as the recorded steps."""
    known = Hardware(
        engine=ENGINE,
        trainer=TrainerTimes(token_s=0.5 / 2000),
        update=UpdateTimes(send_s=0.05, pause_s=0.01),
        control=ControlTimes(
            order_s=0.002, deliver_s=0.002, verify_s=0.05, report_s=0.02, request_s=0.002, answer_s=0.002
        ),
    )
    lockstep = setting(1, 1, lengths=FixedLengths(20))
    wanted = simulate(lockstep, known).step_s
    fitted = calibrate([ObservedRun(events=run_events(period_s=wanted, engine=ENGINE), setting=lockstep)])
    assert simulate(lockstep, fitted).step_s == pytest.approx(wanted, rel=0.01)
    assert fitted.control.request_s == pytest.approx(0.002, rel=0.1)


def test_calibration_does_not_mistake_waiting_for_running_samples_for_a_slow_network():
    """If a publication waits until the engine's rows are empty, only its sending time counts as network time."""
    events = [event | ({"total_s": 3.0} if event["kind"] == "publish" else {}) for event in run_events(engine=ENGINE)]
    drained = ObservedRun(events=events, setting=setting(1, 8, on_update=OnUpdate.DRAIN))
    assert calibrate([drained]).update.send_s == pytest.approx(0.05)


def test_slowdown_of_engine_and_trainer_on_shared_hardware_is_estimated_from_a_second_run():
    """In the second run, engine and trainer are 1.5 times as slow."""
    alone = ObservedRun(events=run_events(engine=ENGINE), setting=setting(1, 1))
    slow = EngineTimes(step_s=1.5 * 0.011, row_s=1.5 * 0.0002, prompt_token_s=1.5 * 3e-5)
    shared = ObservedRun(events=run_events(engine=slow, compute_s=0.75), setting=setting(1, 8))
    contention = calibrate([alone, shared]).contention
    assert 1.4 < contention.engine < 3
    assert 1.4 < contention.trainer < 3
    assert calibrate([alone, alone]).contention == Contention()


def test_calibration_metrics_average_the_steps_after_warm_up_that_overlap_no_evaluation():
    """The first fifth of the steps, and steps that overlap an evaluation, are not counted."""
    events = run_events(steps=30, period_s=2.0)
    measured = measure(events)
    assert measured.step_s == pytest.approx(2.0)
    assert measured.tokens_per_s == pytest.approx(750)
    assert measured.trainer_wait == pytest.approx((2.0 - 0.6 - 0.02) / 2)
    assert measured.discarded == pytest.approx(100 / 1600, rel=0.05)
    middle = 10.0 + 15 * 2.0
    slow = [event | {"elapsed_s": event["elapsed_s"] + 500 * (event["elapsed_s"] > middle)} for event in events]
    evaluation = [
        {"kind": "evaluation_began", "elapsed_s": middle + 1, "model_version": 15},
        {"kind": "evaluation", "elapsed_s": middle + 490, "model_version": 15},
    ]
    at = next(number for number, event in enumerate(slow) if event["elapsed_s"] > 500)
    assert measure([*slow[:at], *evaluation, *slow[at:]]).step_s == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (run_events(steps=5, engine=ENGINE), "a run must be longer"),
        (run_events(steps=30), "--hardware"),
        ([each for each in run_events(engine=ENGINE) if each.pop("stale_tokens", 0) is not None], "stale_tokens"),
    ],
    ids=["too short", "no busy seconds", "an old run"],
)
def test_calibration_without_enough_events_is_rejected_with_an_error_that_names_the_missing_data(events, message):
    """The error message also says what to do."""
    with pytest.raises(UserError, match=message):
        calibrate([ObservedRun(events=events, setting=setting(1, 1))])


PACED = Hardware(engine=EngineTimes(step_s=0.03, row_s=0.0005), trainer=TrainerTimes(token_s=0.001))
DRAIN = setting(1, 4, on_update=OnUpdate.DRAIN, lengths=HeavyTailedLengths(12.0, 0.9, 48), prompt_tokens=9, steps=200)


def test_prediction_that_is_compared_with_a_measurement_is_the_median_of_several_simulations():
    median = simulated_like(run_events(steps=24), DRAIN, PACED)
    runs = [simulate(replace(DRAIN, steps=24, seed=seed), PACED) for seed in range(DRAWS)]
    below, above = (sum(sign * run.step_s < sign * median.step_s for run in runs) for sign in (1, -1))
    assert below == above == DRAWS // 2


@pytest.mark.parametrize("missing", ["tokens", "publish_wait_s"])
def test_run_whose_steps_lack_a_figure_is_rejected_by_the_name_of_the_figure(missing):
    whole = ObservedRun(events=run_events(engine=ENGINE), setting=setting(1, 1))
    lacking = [{name: value for name, value in event.items() if name != missing} for event in whole.events]
    with pytest.raises(UserError, match=f"do not report '{missing}'"):
        calibrate([whole, replace(whole, events=lacking)])
