"""Tests of a step's event with its figures by domain, and of alarms, which are raised once and cleared once."""

from __future__ import annotations

from typing import Any

import pytest

from pipelinerl.controller.decisions.step_review import note_outdated, note_stages, step_taken
from pipelinerl.controller.state.effects import Record
from pipelinerl.controller.state.run_state import RunState
from pipelinerl.messages import ActorAlive, ConsumedReport, GroupOutdated, GroupStages, StepDone, VerifierFigures
from tests.controller.world import knobs


@pytest.fixture
def state() -> RunState:
    return RunState(knobs=knobs(), first_domain_weights={"a": 1.0, "b": 2.0})


def taken(
    state: RunState, version: int, *, by_domain: dict[str, dict[str, float]], **stats: float
) -> list[dict[str, Any]]:
    report = StepDone(
        report_id=f"e1-step-{version}",
        epoch=1,
        model_version=version,
        consumed=ConsumedReport(),
        stats=stats,
        by_domain=by_domain,
        by_tag={"hard": {"rollouts": 4.0}},
    )
    effects = step_taken(state, report)
    return [{"kind": each.kind} | each.fields for each in effects if isinstance(each, Record)]


def alive(state: RunState, name: str, **figures: Any) -> None:
    verifiers = {"a": VerifierFigures(**figures)}
    state.actors[name] = (ActorAlive(name=name, groups_in_flight=0, groups_done=0, retries=0, verifiers=verifiers), 0.0)


def test_group_given_up_by_an_actor_counts_as_stale_in_one_step(state: RunState) -> None:
    for index, domain in enumerate(("a", "a", "b", "forged")):
        note_outdated(state, GroupOutdated(order_id="", index=index, oldest=0, current=9, domain=domain))
    (step,) = taken(state, 1, by_domain={"a": {"groups": 6.0, "stale_groups": 2.0, "stale": 0.25}})
    assert step["by_domain"]["a"] == {"groups": 6.0, "stale_groups": 4.0, "stale": 0.4}
    assert step["by_domain"]["b"] == {"stale_groups": 1, "stale": 1.0}, "a domain of which nothing else came"
    assert "forged" not in step["by_domain"] and step["by_tag"] == {"hard": {"rollouts": 4.0}}
    (step,) = taken(state, 2, by_domain={"a": {"groups": 6.0}})
    assert step["by_domain"]["a"]["stale"] == 0.0


def test_verifier_figures_sum_over_all_actors_since_the_previous_step(state: RunState) -> None:
    alive(state, "one", judged=10, seconds=1.0)
    alive(state, "two", judged=8, errors=1, timeouts=1, seconds=3.0)
    (step,) = taken(state, 1, by_domain={"a": {}})
    assert step["by_domain"]["a"].items() >= {"verified": 20, "verifier_errors": 2, "verifier_s": 0.2}.items()
    alive(state, "two", judged=18, errors=1, timeouts=1, seconds=4.0)
    (step,) = taken(state, 2, by_domain={"a": {}})
    assert step["by_domain"]["a"].items() >= {"verified": 10, "verifier_errors": 0, "verifier_s": 0.1}.items()
    (step,) = taken(state, 3, by_domain={"a": {}})
    assert step["by_domain"]["a"]["verified"] == 0 and "verifier_s" not in step["by_domain"]["a"]
    alive(state, "two", judged=5, seconds=0.5)
    (step,) = taken(state, 4, by_domain={"a": {}})
    assert step["by_domain"]["a"]["verified"] > 0, "an actor that began anew counts from 0"


def test_alarm_is_raised_once_and_cleared_once(state: RunState) -> None:
    cut = {"a": {"rollouts": 100.0, "truncated": 0.5}}
    fine = {"a": {"rollouts": 100.0, "truncated": 0.0}}
    said = [taken(state, version, by_domain=cut)[1:] for version in range(1, 11)]
    assert [len(each) for each in said] == [0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    (alarm,) = said[4]
    assert (alarm["kind"], alarm["alarm"], alarm["domain"], alarm["step"]) == ("alarm", "truncated", "a", 5)
    assert state.watched.alarms.keys() == {"truncated:a"}
    said = [taken(state, version, by_domain=fine)[1:] for version in range(11, 17)]
    assert [each["kind"] for events in said for each in events] == ["alarm_cleared"] and not state.watched.alarms


def test_number_of_remembered_steps_is_bounded(state: RunState) -> None:
    for version in range(1, 200):
        taken(state, version, by_domain={"a": {"rollouts": 1.0}}, entropy=1.0)
    assert len(state.watched.recent) == 25 and len(state.watched.first_entropies) == 10
    assert state.watched.recent[-1].step == 199


def test_step_event_includes_stage_timings_of_at_most_four_groups_once(state: RunState) -> None:
    for first in (0, 3):
        told = [GroupStages(index, 1.0, 2.0, 3.0, "http://a", [(0, 5)]) for index in range(first, first + 3)]
        note_stages(state, ActorAlive(name="one", groups_in_flight=0, groups_done=0, retries=0, stages=told))
    (step,) = taken(state, 1, by_domain={})
    assert step["stages"] == [[index, 1.0, 2.0, 3.0, "http://a", [(0, 5)]] for index in range(4)]
    (step,) = taken(state, 2, by_domain={})
    assert step["stages"] == []


def test_tool_calls_are_only_figures_of_domains_that_offer_tools(state: RunState) -> None:
    alive(state, "one", judged=10, tool_episodes=4, calls_parsed=6, calls_malformed=1, episodes=4, environment_s=2.0)
    (step,) = taken(state, 1, by_domain={"a": {}})
    assert step["by_domain"]["a"].items() >= {"calls_parsed": 6, "calls_malformed": 1, "tool_errors": 0}.items()
    assert step["by_domain"]["a"].items() >= {"episodes": 4, "environment_s": 0.5}.items()
    alive(state, "one", judged=12, tool_episodes=5, calls_parsed=8, calls_malformed=1, tool_errors=3, episodes=5)
    (step,) = taken(state, 2, by_domain={"a": {}})
    assert step["by_domain"]["a"].items() >= {"calls_parsed": 2, "calls_malformed": 0, "tool_errors": 3}.items()
