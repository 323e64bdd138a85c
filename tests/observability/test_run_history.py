"""Tests of the incidents in a run's history: merged repetitions, durations, and their order by harm."""

from __future__ import annotations

from typing import Any

from pipelinerl.observability.run_history import Incidents, tell


def at(elapsed_s: float, kind: str, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "elapsed_s": elapsed_s, **fields}


def stale(elapsed_s: float, kind: str = "alarm") -> dict[str, Any]:
    return at(elapsed_s, kind, alarm="stale", domain="d", what="too old")


def test_incidents_are_ranked_by_harm_and_alarms_by_duration() -> None:
    events = [
        at(0, "run_started"),
        at(1, "trainer_ready", epoch=1),
        *(event for second in range(2, 40, 2) for event in (stale(second), stale(second + 1, "alarm_cleared"))),
        at(41, "alarm", alarm="entropy", domain="", what="collapse"),
        at(42, "engine_suspect", url="http://b"),
        at(43, "engine_lost", url="http://a", reason="silent"),
        at(50, "engine_verified", url="http://a"),
        at(51, "stalled", waits_for="an engine"),
        at(55, "step", step=1),
        at(56, "trainer_ready", epoch=2),
        at(81, "engines"),
        at(82, "engine_lost", url="http://c", reason="drained", planned=True),
    ]
    ranked = [(each.kind, each.count, each.seconds) for each in tell(events).incidents]
    assert ranked == [
        ("engine_lost", 1, 7),
        ("trainer_lost", 1, 0),
        ("stalled", 1, 4),
        ("engine_suspect", 1, 40),
        ("alarm", 1, 41),
        ("alarm", 19, 19),
    ]


def test_trainer_that_left_before_the_next_one_began_is_no_incident() -> None:
    events = [at(1, "trainer_ready"), at(2, "trainer_left"), at(3, "run_started"), at(4, "trainer_ready")]
    assert tell(events).incidents == ()


def test_harmful_incident_replaces_the_least_harmful_one_if_there_are_too_many() -> None:
    incidents = Incidents()
    for number in range(600):
        incidents.take(at(number, "engine_slow", url=f"http://{number}"))
    incidents.take(at(601, "engine_lost", url="http://a"))
    incidents.take(stale(602))
    ranked = incidents.ranked()
    assert len(ranked) == 500 and ranked[0].kind == "engine_lost" and ranked[-1].kind == "engine_slow"
