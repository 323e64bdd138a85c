"""`pipelinerl bottleneck`: the cause of waits and the most helpful change, from events with known durations."""

import json

import pytest
from typer.testing import CliRunner

from pipelinerl.cli import app
from pipelinerl.plugins.simulation.bottleneck import newest_part, stretches, tried
from pipelinerl.plugins.simulation.calibration import ObservedRun, calibrate
from pipelinerl.plugins.simulation.hardware import EngineTimes
from pipelinerl.plugins.simulation.setting import FixedLengths
from pipelinerl.staleness import StalenessBounds
from tests.plugins.simulation.recorded import run_events
from tests.plugins.simulation.settings import setting
from tests.plugins.simulation.test_planning import run_directory

ENGINE = EngineTimes(step_s=0.011, row_s=0.0002)


def busy(events, share):
    """Return the events with an engine that is busy for this share of the time."""
    joined = {"kind": "engine_verified", "time": 0.0, "elapsed_s": 0.5, "url": "http://engine"}
    looks = [
        {"kind": "engines", "time": 0.0, "elapsed_s": at, "busy_s": share * at, "occupancy": share}
        for at in [event["elapsed_s"] for event in events if event["kind"] == "step"]
    ]
    return [events[0], joined, *sorted([*events[1:], *looks], key=lambda event: event["elapsed_s"])]


def judged_in(events, seconds):
    """Return the events with traced groups that were judged for so long, after 0.3 s of sampling."""
    return [
        event | ({"stages": [[1, 0.0, 0.3, 0.3 + seconds, "", []]]} if event["kind"] == "step" else {})
        for event in events
    ]


#: Per cause: the events of a run with a period of 2 s per step.
CAUSES = {
    "the trainer": busy(run_events(compute_s=1.6), 0.3),
    "engines": busy(run_events(compute_s=0.2), 0.95),
    "publications": busy(run_events(compute_s=0.2, publish_wait_s=1.2), 0.3),
    "the controller": busy(run_events(compute_s=0.2, report_s=1.5), 0.3),
    "verifiers": judged_in(busy(run_events(compute_s=0.2), 0.3), 1.0),
    "orders: engines are idle": busy(run_events(compute_s=0.2), 0.3),
    "engines, which rest while it computes": busy(run_events(compute_s=0.6), 0.6),
}


@pytest.mark.parametrize(("cause", "events"), CAUSES.items(), ids=CAUSES)
def test_cause_of_the_trainers_waits_is_named(cause, events):
    found = stretches(events)
    assert {each.waits_for for each in found} == {cause}
    assert [(each.first, each.last) for each in found] == [(2, 8), (9, 15), (16, 22), (23, 30)]
    for each in found:
        assert each.step_s == pytest.approx(2.0)
        assert each.computes + each.waits + each.held + each.rest == pytest.approx(1.0)


def test_wait_during_evaluations_is_not_blamed_on_engines():
    events = busy(run_events(compute_s=0.2), 0.95)
    began = {"kind": "evaluation_began", "time": 0.0, "elapsed_s": 11.0}
    assert {each.waits_for for each in stretches([*events, began])} == {"evaluations"}


def test_restart_of_the_trainer_is_not_blamed_on_the_controller():
    again = {"kind": "trainer_ready", "time": 0.0, "elapsed_s": 69.0, "epoch": 2}
    found = stretches(sorted([*CAUSES["the controller"], again], key=lambda event: event["elapsed_s"]))
    assert [each.waits_for for each in found] == [*["the controller"] * 3, "a trainer that starts again"]


def test_faster_trainer_helps_a_run_whose_trainer_is_the_bottleneck():
    events = run_events(engine=ENGINE, compute_s=1.98, report_s=0.0, publish_wait_s=0.0)
    error, changes = tried(ObservedRun(events=events, setting=setting(1, 8, lengths=FixedLengths(20))), actor_s=0.0)
    assert abs(error) < 0.1 and changes[0].name == "a trainer twice as fast"
    assert changes[0].step_s < 0.7 * 2.0
    (engine,) = [change for change in changes if change.name == "one more engine"]
    assert engine.step_s == pytest.approx(2.0, rel=0.05)


def test_busy_verifiers_are_calibrated_by_the_number_that_work_at_once():
    events = judged_in(run_events(engine=ENGINE), 3.0)
    for event in events:
        if event["kind"] == "step":  # 64 verdicts in 2 s, 0.05 s each: 1.6 verifiers are busy, and groups queue
            event["by_domain"] = {"a": {"verified": 64.0, "verifier_s": 0.05}}
    control = calibrate([ObservedRun(events=events, setting=setting(1, 8))]).control
    assert control.verify_s == pytest.approx(8 * 0.05) and control.verifiers == 2


def test_only_the_part_since_the_last_change_of_pace_is_simulated():
    events = busy(run_events(engine=ENGINE), 0.5)
    knobs = {"kind": "knobs", "time": 0.0, "elapsed_s": 30.0, "changes": {"k": 16.0}}
    joined = {"kind": "engine_verified", "time": 0.0, "elapsed_s": 50.0, "url": "http://another"}
    both = sorted([*events, knobs, joined], key=lambda event: event["elapsed_s"])
    part = newest_part(ObservedRun(events=both, setting=setting(1, 8)))
    assert part.setting.bounds == StalenessBounds(1, 16) and part.setting.engines == 2
    assert part.events[0] == joined


def test_command_prints_stretches_changes_and_the_recommended_one(tmp_path):
    run_dir = run_directory(tmp_path / "run", run_events(engine=ENGINE, compute_s=1.8, report_s=0.0))
    shown = CliRunner().invoke(app, ["bottleneck", str(run_dir)])
    assert shown.exit_code == 0, shown.output
    assert "the trainer" in shown.output and "most helpful: a trainer twice as fast, 2 →" in shown.output
    figures = json.loads(CliRunner().invoke(app, ["bottleneck", str(run_dir), "--json"]).stdout)
    assert figures["recommended"]["name"] == "a trainer twice as fast" and len(figures["stretches"]) == 4
    assert {"one more engine", "j + 1", "a larger k"} <= {change["name"] for change in figures["changes"]}


def test_run_that_cannot_be_simulated_still_shows_what_it_waited_for(tmp_path):
    run_dir = run_directory(tmp_path / "run", run_events(compute_s=0.2))
    shown = CliRunner().invoke(app, ["bottleneck", str(run_dir)])
    assert shown.exit_code == 0 and "engines" in shown.output and "no change was simulated: " in shown.output
