"""A real run on two engines whose weights change at every step, except on the one that answers an evaluation."""

import json

import pytest

from tests.fakes.live_run import launched, light_run, output_of

PROBLEMS, SAMPLES = 48, 8


@pytest.mark.slow  # test_evaluator.py and tests/engines/http/test_pool.py test this faster
def test_pinned_evaluation_is_answered_by_one_version_while_the_trainer_takes_steps(tmp_path):
    directory = tmp_path / "run"
    overrides = (
        "engine.count=2",
        "run.steps=5000",
        "staleness.j=1",
        "staleness.k=4",
        "actor.groups_in_flight=8",
        "training.rollouts_per_step=16",
        f"evaluation.problems={PROBLEMS}",
        "evaluation.interval_steps=20",
        f"evaluation.samples={SAMPLES}",
        "evaluation.temperature=1.0",
        "evaluation.pass_at=[1, 8]",
    )
    with launched(light_run(directory, *overrides), directory) as run:
        run.until(lambda run: len(run.events("evaluation")) >= 2, "an evaluation during training")
        status = json.loads(output_of("status", str(directory), "--json"))
        output_of("stop", str(directory))
        assert run.end() == 0, run.story()
    first, *pinned, last = run.events("evaluation")
    assert first["pin"] == last["pin"] == "gate" and first["model_version"] == 0
    engines = {event["url"] for event in run.events("engine_joined")}
    for event in pinned[:1]:
        assert (event["pin"], event["incomplete"]) == ("engine", ""), event
        assert event["engine"] in engines
        assert event["steps_meanwhile"] >= 1, "training goes on"
    for event in (first, *pinned, last):
        assert event["one_version"] and event["version_min"] == event["version_max"] == event["model_version"], event
        one, eight = event["pass_at"]
        assert (one["k"], one["problems"], eight["k"]) == (1, PROBLEMS, 8)
        assert one["value"] == pytest.approx(event["accuracy"])
        assert 0 <= one["low"] <= one["value"] <= eight["value"] <= eight["high"] <= 1
    published = [event["model_version"] for event in run.events("publish")]
    during = range(pinned[0]["model_version"], pinned[0]["model_version"] + pinned[0]["steps_meanwhile"])
    assert set(during) <= set(published), "updates at every step"
    assert status["held_out"]["one_version"] and [each["k"] for each in status["held_out"]["pass_at"]] == [1, 8]
    assert "pass@8" in run.output
