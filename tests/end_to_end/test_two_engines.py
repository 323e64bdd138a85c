"""A real run on two engines: one is asked many times over while weights change at every step; the other is killed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from tests.end_to_end.test_live_run import command
from tests.fakes.live_fleet import assert_nothing_lost, fleet, until_groups, until_serving
from tests.fakes.live_run import LiveRun, launched, light_run

PROBLEMS, SAMPLES = 16, 8
RUN = (
    "engine.count=2",
    "run.steps=100000",
    "launch.restarts=1000",
    "staleness.j=1",
    "staleness.k=8",
    "training.rollouts_per_step=16",
    "actor.groups_in_flight=4",
    f"evaluation.problems={PROBLEMS}",
    "evaluation.interval_steps=5",
    f"evaluation.samples={SAMPLES}",
    "evaluation.temperature=1.0",
    "evaluation.pass_at=[1, 8]",
)
#: So hot that every token stays as likely as another, whatever was learnt: one in sixteen answers has all 40.
LONG_ANSWERS = ("sampling.max_tokens=40", "sampling.temperature=10.0", "actor.stream_interval_s=0.02")


@dataclass(frozen=True, slots=True)
class Ended:
    """The run, and its status while it was evaluated."""

    run: LiveRun
    status: dict[str, Any]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """One version is evaluated beside the training; then an engine dies while it generates; then the run is stopped."""
    directory = tmp_path_factory.mktemp("two_engines") / "run"
    with launched(light_run(directory, *RUN, *LONG_ANSWERS), directory) as run:
        until_serving(run, "engine-0", "engine-1")
        run.until(lambda run: len(run.events("evaluation")) >= 2, "an evaluation beside the training")
        status = json.loads(command("status", str(directory), "--json"))
        run.until(lambda run: fleet(run)["engine-0"].running > 0, "engine-0 to have work")
        run.role("engine-0").kill()
        run.until(lambda run: run.events("group_handed_over"), "a group to be handed over")
        until_groups(run, 32)
        command("stop", str(directory))
        assert run.end() == 0, run.story()
    return Ended(run, status)


def test_one_version_answers_while_the_trainer_takes_steps(ended: Ended) -> None:
    run, held_out = ended.run, ended.status["held_out"]
    first, *between, last = run.events("evaluation")
    pinned = between[0]
    assert first["pin"] == last["pin"] == "gate" and first["model_version"] == 0
    assert (pinned["pin"], pinned["incomplete"]) == ("engine", ""), pinned
    assert pinned["engine"] in {event["url"] for event in run.events("engine_joined")}
    assert pinned["steps_meanwhile"] >= 2, "training goes on"
    for event in (first, *between, last):
        assert event["one_version"] and event["version_min"] == event["version_max"] == event["model_version"], event
    for event in (first, pinned, last):
        one, eight = event["pass_at"]
        assert (one["k"], one["problems"], eight["k"]) == (1, PROBLEMS, 8)
        assert one["value"] == pytest.approx(event["accuracy"])
        assert 0 <= one["low"] <= one["value"] <= eight["value"] <= eight["high"] <= 1
    published = {event["model_version"] for event in run.events("publish")}
    during = range(pinned["model_version"], pinned["model_version"] + pinned["steps_meanwhile"])
    assert published.issuperset(during), "updates at every step"
    assert held_out["one_version"] and [each["k"] for each in held_out["pass_at"]] == [1, 8]
    assert "pass@8" in run.output


def test_an_engine_that_is_killed_with_long_answers_costs_only_what_had_not_come(ended: Ended) -> None:
    """kill -9 in mid-generation: the other engine goes on with the tokens that were sampled."""
    assert_nothing_lost(ended.run)
    handed_over = ended.run.events("group_handed_over")
    assert sum(event["tokens_kept"] for event in handed_over) > 0, handed_over
    assert not any(event["tokens_resampled"] for event in handed_over), handed_over
