"""Tests of each alarm at its threshold, below it, and after recovery; and of a healthy run without alarms."""

from __future__ import annotations

from typing import Any

import pytest

from pipelinerl.controller.decisions.alarms import THRESHOLDS, AlarmKind, alarms_of
from pipelinerl.controller.state.watched_steps import FIRST_STEPS, WINDOW, DomainCounts, WatchedStep

FIRST = [1.0] * FIRST_STEPS


def steps(count: int = WINDOW, **fields: Any) -> list[WatchedStep]:
    given = {"entropy": 1.0, "right": 0.5, "length": 100.0}
    return [WatchedStep(step=number, **given | fields) for number in range(count)]


def raised(made: list[WatchedStep], *, before: tuple[str, ...] = (), first: list[float] = FIRST) -> set[str]:
    return {alarm.key for alarm in alarms_of(made, first_entropies=first, raised=dict.fromkeys(before, ""))}


def test_thresholds_match_the_documentation() -> None:
    assert (THRESHOLDS.entropy, THRESHOLDS.right, THRESHOLDS.length) == (0.1, 0.9, 2.0)
    assert (THRESHOLDS.truncated, THRESHOLDS.stale, THRESHOLDS.recent_steps) == (0.2, 0.1, 5)


def test_learning_run_raises_no_alarm() -> None:
    assert raised(steps()) == set()
    assert raised(steps(entropy=0.01, right=0.97)) == set(), "what is learned needs no entropy"
    assert raised([]) == set() and raised(steps(4, entropy=0.0)) == set()


@pytest.mark.parametrize(
    ("entropy", "before", "stands"),
    [(0.101, False, False), (0.099, False, True), (0.119, True, True), (0.121, True, False)],
)
def test_entropy_alarm_is_raised_at_its_threshold(entropy: float, before: bool, stands: bool) -> None:
    key = "entropy:"
    assert (key in raised(steps(entropy=entropy), before=(key,) if before else ())) is stands


def test_entropy_alarm_is_not_raised_before_the_reference_steps_are_complete() -> None:
    assert raised(steps(entropy=0.0), first=FIRST[:-1]) == set()
    assert raised(steps(entropy=None)) == set()


@pytest.mark.parametrize(
    ("length", "before", "stands"),
    [(199.0, False, False), (201.0, False, True), (161.0, True, True), (159.0, True, False)],
)
def test_length_alarm_is_raised_at_its_threshold(length: float, before: bool, stands: bool) -> None:
    made = [*steps(20), *steps(5, length=length)]
    assert ("length:" in raised(made, before=("length:",) if before else ())) is stands
    assert raised(made[1:], before=("length:",)) == set(), "not before there are steps to compare with"


@pytest.mark.parametrize(
    ("kind", "seen", "bad", "before", "stands"),
    [
        (AlarmKind.TRUNCATED, 100, 20, False, False),
        (AlarmKind.TRUNCATED, 100, 21, False, True),
        (AlarmKind.TRUNCATED, 100, 17, True, True),
        (AlarmKind.TRUNCATED, 100, 16, True, False),
        (AlarmKind.TRUNCATED, 3, 3, False, False),
        (AlarmKind.STALE, 100, 10, False, False),
        (AlarmKind.STALE, 100, 11, False, True),
        (AlarmKind.STALE, 1000, 81, True, True),
        (AlarmKind.STALE, 1000, 80, True, False),
        (AlarmKind.STALE, 3, 3, False, False),
    ],
)
def test_truncation_and_staleness_alarms_are_raised_at_their_thresholds(
    kind: AlarmKind, seen: int, bad: int, before: bool, stands: bool
) -> None:
    counts = (
        DomainCounts(rollouts=seen, truncated=bad)
        if kind is AlarmKind.TRUNCATED
        else DomainCounts(groups=seen - bad, stale=bad)
    )
    key = f"{kind}:sums"
    made = steps(domains={"sums": counts, "words": DomainCounts(rollouts=1000, groups=1000)})
    assert raised(made, before=(key,) if before else ()) == ({key} if stands else set())


def test_alarm_messages_contain_figures_and_a_remedy() -> None:
    made = steps(entropy=0.01, domains={"sums": DomainCounts(rollouts=50, truncated=25, groups=5, stale=20)})
    said = {alarm.kind: alarm.what for alarm in alarms_of(made, first_entropies=FIRST, raised={})}
    assert (
        "50% of the answers of sums" in said[AlarmKind.TRUNCATED] and "training.truncated" in said[AlarmKind.TRUNCATED]
    )
    assert "80% of the groups of sums" in said[AlarmKind.STALE]
    assert "0.01 nats" in said[AlarmKind.ENTROPY] and "only 50%" in said[AlarmKind.ENTROPY]
