"""Tests of a run's history: its incidents by harm, and rewards by the version that sampled them."""

import pytest

from pipelinerl.observability.run_history import Incidents, tell


def at(elapsed_s, kind, **fields):
    return {"kind": kind, "elapsed_s": elapsed_s, **fields}


def stale(elapsed_s, kind="alarm"):
    return at(elapsed_s, kind, alarm="stale", domain="d", what="too old")


def test_incidents_are_ranked_by_harm_and_alarms_by_duration():
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


def test_trainer_that_left_before_the_next_one_began_is_no_incident():
    events = [at(1, "trainer_ready"), at(2, "trainer_left"), at(3, "run_started"), at(4, "trainer_ready")]
    assert tell(events).incidents == ()


def test_harmful_incident_replaces_the_least_harmful_one_if_there_are_too_many():
    incidents = Incidents()
    for number in range(600):
        incidents.take(at(number, "engine_slow", url=f"http://{number}"))
    incidents.take(at(601, "engine_lost", url="http://a"))
    incidents.take(stale(602))
    ranked = incidents.ranked()
    assert len(ranked) == 500 and ranked[0].kind == "engine_lost" and ranked[-1].kind == "engine_slow"


def learning(lag, *, names_version):
    """Return steps of a run whose version v samples answers with a mean reward of v / 10, trained `lag` steps later."""
    steps = []
    for step in range(1, 20):
        version = max(0, step - lag)
        placed = {"sampled_version": version} if names_version else {"staleness_mean": step - version}
        steps.append(at(step, "step", step=step, reward=version / 10, **placed))
    return steps


@pytest.mark.parametrize("names_version", [True, False])
@pytest.mark.parametrize("lag", [1, 3, 8])
def test_reward_of_a_version_does_not_depend_on_the_lag_of_the_step_that_trained_it(lag, names_version):
    rewards = tell(learning(lag, names_version=names_version)).by_sampling_version()
    assert rewards.y == pytest.approx([version / 10 for version in rewards.x]) and rewards.x[-1] == 19 - lag
