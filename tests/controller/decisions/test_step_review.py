"""Tests of the event of a training step, with metrics by domain, and of alarms, which are raised and cleared once."""

import pytest

from pipelinerl.controller.decisions.step_review import (
    Alarm,
    alarms_of,
    note_outdated,
    note_stages,
    settle_alarm,
    step_taken,
)
from pipelinerl.controller.state.inputs_and_effects import Record
from pipelinerl.controller.state.run_state import (
    FIRST_STEPS,
    WINDOW,
    DomainCounts,
    RunState,
    Sampled,
    WatchedStep,
    WatchedSteps,
    discarded_over,
)
from pipelinerl.messages import ConsumedReport, GroupOutdated, GroupStages, VerifierFigures
from tests.controller.world import alive, knobs, step_done


@pytest.fixture
def state():
    return RunState(knobs=knobs(), first_domain_weights={"a": 1.0, "b": 2.0})


def taken(state, version, *, by_domain, **stats):
    by_tag = {"hard": {"rollouts": 4.0}}
    report = step_done(version, ConsumedReport(), stats=stats, by_domain=by_domain, by_tag=by_tag)
    effects = step_taken(state, report, lag="", now=20.0 * version)
    return [{"kind": each.kind} | each.fields for each in effects if isinstance(each, Record)]


def judged(state, name, **figures):
    verifiers = {"a": VerifierFigures(**figures)}
    state.actors[name] = (alive(name, verifiers=verifiers), 0.0)


def test_group_that_an_actor_dropped_as_too_old_counts_as_stale_in_one_step_only(state):
    for index, domain in enumerate(("a", "a", "b", "forged")):
        note_outdated(state, GroupOutdated(order_id="", index=index, oldest=0, current=9, domain=domain))
    (step,) = taken(state, 1, by_domain={"a": {"groups": 6.0, "stale_groups": 2.0, "stale": 0.25}})
    assert step["by_domain"]["a"] == {"groups": 6.0, "stale_groups": 4.0, "stale": 0.4}
    assert step["by_domain"]["b"] == {"stale_groups": 1, "stale": 1.0}, "a domain of which nothing else came"
    assert "forged" not in step["by_domain"] and step["by_tag"] == {"hard": {"rollouts": 4.0}}
    (step,) = taken(state, 2, by_domain={"a": {"groups": 6.0}})
    assert step["by_domain"]["a"]["stale"] == 0.0


def test_verifier_metrics_of_a_step_are_summed_over_all_actors_since_the_previous_step(state):
    judged(state, "one", judged=10, seconds=1.0)
    judged(state, "two", judged=8, errors=1, timeouts=1, seconds=3.0)
    (step,) = taken(state, 1, by_domain={"a": {}})
    assert step["by_domain"]["a"].items() >= {"verified": 20, "verifier_errors": 2, "verifier_s": 0.2}.items()
    judged(state, "two", judged=18, errors=1, timeouts=1, seconds=4.0)
    (step,) = taken(state, 2, by_domain={"a": {}})
    assert step["by_domain"]["a"].items() >= {"verified": 10, "verifier_errors": 0, "verifier_s": 0.1}.items()
    (step,) = taken(state, 3, by_domain={"a": {}})
    assert step["by_domain"]["a"]["verified"] == 0 and "verifier_s" not in step["by_domain"]["a"]
    judged(state, "two", judged=5, seconds=0.5)
    (step,) = taken(state, 4, by_domain={"a": {}})
    assert step["by_domain"]["a"]["verified"] > 0, "the counters of a restarted actor begin at 0"


def test_alarm_of_a_domain_is_raised_once_and_cleared_once(state):
    events = []
    for version in range(1, 21):
        share = 0.5 if version < 11 else 0.0
        events += taken(state, version, by_domain={"a": {"rollouts": 100.0, "truncated": share}})[1:]
    assert [(each["kind"], each["alarm"], each["domain"]) for each in events] == [
        ("alarm", "truncated", "a"),
        ("alarm_cleared", "truncated", "a"),
    ]
    assert events[0]["step"] == 7 and "50% of the answers of a" in events[0]["what"]


#: Per row: whether the condition holds at each step, the seconds per step, and the events, as kind and step.
COURSES = {
    "a short excursion raises nothing": ("++..++..", 30.0, []),
    "three steps in a row raise it": ("..+++", 30.0, [("alarm", 4)]),
    "five calm steps and 60 s clear it": ("+++" + "." * 7, 30.0, [("alarm", 2), ("alarm_cleared", 8)]),
    "calm of less than 60 s does not clear it": ("+++" + "." * 20, 2.0, [("alarm", 2)]),
    "crossings of the limit are one alarm": ("+++" + "...+" * 30, 10.0, [("alarm", 2)]),
    "it may be raised again": ("+++......+++", 60.0, [("alarm", 2), ("alarm_cleared", 8), ("alarm", 11)]),
}


@pytest.mark.parametrize(("course", "step_s", "expected"), COURSES.values(), ids=COURSES.keys())
def test_alarm_does_not_flap(course, step_s, expected):
    watched, alarm = WatchedSteps(), Alarm("stale", "too old", domain="a")
    effects = []
    for number, holds in enumerate(course):
        given = alarm if holds == "+" else None
        for each in settle_alarm(watched, alarm.key, given, step=number, now=number * step_s):
            assert isinstance(each, Record)
            effects.append((each.kind, each.fields["step"]))
    assert effects == expected


def test_controller_keeps_the_metrics_of_a_bounded_number_of_steps_for_its_alarms(state):
    for version in range(1, 200):
        taken(state, version, by_domain={"a": {"rollouts": 1.0}}, entropy=1.0)
    assert len(state.watched.recent) == 25 and len(state.watched.first_entropies) == 10
    assert state.watched.recent[-1].step == 199


def test_step_event_includes_stage_timings_of_at_most_four_groups_and_each_only_once(state):
    for first in (0, 3):
        timings = [GroupStages(index, 1.0, 2.0, 3.0, "http://a", [(0, 5)]) for index in range(first, first + 3)]
        note_stages(state, alive("one", stages=timings))
    (step,) = taken(state, 1, by_domain={})
    assert step["stages"] == [[index, 1.0, 2.0, 3.0, "http://a", [(0, 5)]] for index in range(4)]
    (step,) = taken(state, 2, by_domain={})
    assert step["stages"] == []


def test_step_event_has_tool_call_metrics_only_for_domains_with_tools(state):
    judged(state, "one", judged=10, tool_episodes=4, calls_parsed=6, calls_malformed=1, episodes=4, environment_s=2.0)
    (step,) = taken(state, 1, by_domain={"a": {}})
    assert step["by_domain"]["a"].items() >= {"calls_parsed": 6, "calls_malformed": 1, "tool_errors": 0}.items()
    assert step["by_domain"]["a"].items() >= {"episodes": 4, "environment_s": 0.5}.items()
    judged(state, "one", judged=12, tool_episodes=5, calls_parsed=8, calls_malformed=1, tool_errors=3, episodes=5)
    (step,) = taken(state, 2, by_domain={"a": {}})
    assert step["by_domain"]["a"].items() >= {"calls_parsed": 2, "calls_malformed": 0, "tool_errors": 3}.items()


FIRST = [1.0] * FIRST_STEPS


def steps(count=WINDOW, **fields):
    given = {"entropy": 1.0, "right": 0.5, "length": 100.0}
    return [WatchedStep(step=number, **given | fields) for number in range(count)]


def raised(made, *, before=(), first=FIRST):
    return {alarm.key for alarm in alarms_of(made, first_entropies=first, raised=dict.fromkeys(before, ""))}


def test_run_that_learns_raises_no_alarm():
    assert raised(steps()) == set()
    assert raised(steps(entropy=0.01, right=0.97)) == set(), "what is learned needs no entropy"
    assert raised([]) == set() and raised(steps(4, entropy=0.0)) == set()


def lengthening(length):
    return [*steps(20), *steps(5, length=length)]


def discarding(tokens, count=WINDOW):
    return steps(count, trained=Sampled(100.0, 10_000.0), stale=Sampled(tokens / 200, tokens))


#: Steps of a run, and whether the alarm is raised if it was not raised before, and if it was.
THRESHOLDS = {
    "entropy": [
        (steps(entropy=0.121), False, False),
        (steps(entropy=0.119), False, True),
        (steps(entropy=0.101), False, True),
        (steps(entropy=0.099), True, True),
        (steps(entropy=None), False, False),
    ],
    "length": [
        (lengthening(159.0), False, False),
        (lengthening(161.0), False, True),
        (lengthening(199.0), False, True),
        (lengthening(201.0), True, True),
        (lengthening(201.0)[1:], False, False),  # too few steps to compare with
    ],
    "discard": [
        (discarding(39.0), False, False),
        (discarding(41.0), False, True),
        (discarding(50.0), False, True),
        (discarding(51.0), True, True),
        (discarding(999.0, WINDOW - 1), False, False),  # one group is no tendency
    ],
}


@pytest.mark.parametrize(
    ("kind", "made", "first", "again"), [(kind, *row) for kind, rows in THRESHOLDS.items() for row in rows]
)
def test_alarm_of_the_run_is_raised_at_its_threshold_and_cleared_below_it(kind, made, first, again):
    key = f"{kind}:"
    assert (key in raised(made), key in raised(made, before=(key,))) == (first, again)
    assert key not in raised(made, first=FIRST[:-1]) or kind != "entropy", "the reference steps are incomplete"


@pytest.mark.parametrize(
    ("kind", "seen", "bad", "before", "stands"),
    [
        ("truncated", 100, 20, False, False), ("truncated", 100, 21, False, True), ("truncated", 100, 17, True, True),
        ("truncated", 100, 16, True, False), ("truncated", 3, 3, False, False),
        ("stale", 100, 10, False, False), ("stale", 100, 11, False, True), ("stale", 1000, 81, True, True),
        ("stale", 1000, 80, True, False), ("stale", 3, 3, False, False),
        ("unjudged", 100, 5, False, False), ("unjudged", 100, 6, False, True), ("unjudged", 1000, 41, True, True),
        ("unjudged", 1000, 40, True, False), ("unjudged", 3, 3, False, False),
    ],
)  # fmt: skip
def test_alarm_of_a_domain_is_raised_at_its_threshold_and_cleared_below_it(kind, seen, bad, before, stands):
    counts = (
        DomainCounts(groups=seen - bad, stale=bad) if kind == "stale" else DomainCounts(rollouts=seen, **{kind: bad})
    )
    key = f"{kind}:sums"
    made = steps(domains={"sums": counts, "words": DomainCounts(rollouts=1000, groups=1000)})
    assert raised(made, before=(key,) if before else ()) == ({key} if stands else set())


def test_discarding_long_answers_shows_in_the_ratio_of_lengths(state):
    taken(state, 1, by_domain={}, rollouts=90.0, sampled_tokens=900.0, stale_answers=0.0, stale_tokens=0.0)
    taken(state, 2, by_domain={}, rollouts=90.0, sampled_tokens=900.0, stale_answers=20.0, stale_tokens=600.0)
    assert discarded_over(state.watched.recent) == (0.25, pytest.approx(10 / (2400 / 200)))
    taken(state, 3, by_domain={}, rollouts=90.0, sampled_tokens=600.0, stale_answers=0.0, stale_tokens=0.0)
    assert discarded_over(state.watched.recent[2:])[0] == 0.0, "another trainer counts from 0"


def test_groups_that_actors_gave_up_count_as_discarded_at_mean_length(state):
    note_outdated(state, GroupOutdated(order_id="", index=1, oldest=0, current=9, domain="a"))
    taken(state, 1, by_domain={"a": {"groups": 9.0, "rollouts": 36.0}}, rollouts=36.0, sampled_tokens=360.0)
    assert discarded_over(state.watched.recent) == (pytest.approx(0.1), 1.0)
