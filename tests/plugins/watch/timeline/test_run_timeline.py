"""A run's timeline can be requested for any time window at any resolution, however long the run is."""

import json

import pytest

from pipelinerl.plugins.watch.timeline.run_timeline import MOST_GROUPS, RunTimeline, Track
from pipelinerl.plugins.watch.timeline.spans import Span
from tests.plugins.watch.timeline.events_of_a_run import STEP_S, A, B, event, publish, run, step

STEPS = 5_000


def _timeline(events):
    timeline = RunTimeline()
    for each in events:
        timeline.feed(each)
    return timeline


@pytest.fixture(scope="module")
def long_run():
    return _timeline(run(STEPS))


def _track(window, lane, kind):
    (row,) = (each for each in window["lanes"] if each["lane"] == lane)
    (track,) = (each for each in row["tracks"] if each["kind"] == kind)
    return dict(track)


def test_timeline_lists_the_rows_of_engines_before_all_other_rows():
    window = _timeline(run()).window()
    assert [(each["kind"], each["lane"]) for each in window["lanes"]] == [
        ("engine", A), ("engine", B), ("trainer", "trainer"), ("publication", "publication"),
        ("evaluation", "evaluation"), ("checkpoint", "checkpoint"),
    ]  # fmt: skip


def test_timeline_window_at_fine_resolution_has_every_span_unchanged():
    steps = _track(_timeline(run(6)).window(9.0, 12.0, points=3000), "trainer", "step")
    assert steps["start"] == [9.5, 10.5, 11.5] and steps["end"] == [10.0, 11.0, 12.0]
    assert steps["value"] == [1, 2, 3] and steps["count"] == [1, 1, 1] and steps["busy"] == [0.5, 0.5, 0.5]


def test_timeline_window_includes_spans_that_overlap_it():
    steps = _track(_timeline(run(6)).window(9.75, 11.75, points=3000), "trainer", "step")
    assert steps["value"] == [1, 2, 3]


def test_timeline_window_at_coarse_resolution_keeps_the_number_and_total_time_of_spans(long_run):
    steps = _track(long_run.window(points=500), "trainer", "step")
    assert sum(steps["count"]) == STEPS
    assert sum(steps["busy"]) == pytest.approx(STEPS * STEP_S)
    assert len(steps["start"]) <= 1000
    assert all(end >= start for start, end in zip(steps["start"], steps["end"], strict=True))
    assert all(a <= b for a, b in zip(steps["end"][:-1], steps["start"][1:], strict=True))


def test_long_span_of_the_timeline_is_not_merged_with_short_spans():
    track = Track()
    for number in range(100):
        track.add(Span("l", "t", number * 0.01, number * 0.01 + 0.005, number))
    track.add(Span("l", "t", 1.0, 9.0, 100, "long"))
    track.add(Span("l", "t", 9.0, 9.001, 101))
    drawn = track.window(0.0, 10.0, cell=1.0)
    assert drawn["count"] == [100, 1, 1] and drawn["value"][1:] == [100, 101]
    assert drawn["note"][1] == "long" and drawn["start"][1:] == [1.0, 9.0]


def test_merged_spans_of_the_timeline_have_the_value_of_the_longest_span():
    track = Track()
    for number, length in enumerate((0.01, 0.3, 0.02)):
        track.add(Span("l", "t", number * 0.32, number * 0.32 + length, number, f"note {number}"))
    drawn = track.window(0.0, 1.0, cell=1.0)
    assert (drawn["value"], drawn["note"], drawn["count"]) == ([1], ["note 1"], [3])
    assert drawn["busy"] == [pytest.approx(0.33)]


def test_timeline_draws_spans_that_have_not_ended_up_to_the_present_time():
    timeline = _timeline([*run(2, ended=False), event("evaluation_began", 12.0, model_version=2)])
    timeline.feed(step(3, 20.0))
    serves = _track(timeline.window(), A, "serves")
    assert (serves["value"][-1], serves["end"][-1]) == (2, 20.0)
    evaluation = _track(timeline.window(), "evaluation", "evaluation")
    assert (evaluation["start"][-1], evaluation["end"][-1], evaluation["value"][-1]) == (12.0, 20.0, 2)
    timeline.feed(publish(3, 21.0, A))
    timeline.feed(event("engines", 21.5))
    assert _track(timeline.window(), A, "serves")["value"][-2:] == [2, 3]
    assert _track(timeline.window(0.0, 5.0), "evaluation", "evaluation")["value"] == [0]


def test_timeline_window_with_too_many_groups_shows_every_nth_group(long_run):
    few = long_run.window(100.0, 103.0)["groups"]
    assert few["total"] == len(few["order"]) and 3 <= few["total"] <= 6
    assert all(claimed <= 103.0 for claimed in few["claimed"]) and all(at >= 100.0 for at in few["trained"])
    every = long_run.window()["groups"]
    assert every["total"] == STEPS and len(every["order"]) <= MOST_GROUPS
    gaps = {b - a for a, b in zip(every["step"][:-1], every["step"][1:], strict=True)}
    assert len(gaps) == 1, "the groups are thinned evenly"
    assert few["spans"][0] == ((0, 4), (1, 2)) and set(few["engine"]) == {A}


def test_timeline_window_contains_only_event_marks_between_its_start_and_end():
    window = _timeline(run(6)).window(15.5, 20.0)
    assert [mark[1] for mark in window["marks"]] == ["knobs", "run_finished"]


def test_timeline_of_a_run_without_events_has_empty_rows():
    window = RunTimeline().window()
    assert [lane["kind"] for lane in window["lanes"]] == ["trainer", "publication", "evaluation", "checkpoint"]
    assert all(track["start"] == [] for lane in window["lanes"] for track in lane["tracks"])


def test_timeline_window_is_json_of_bounded_size(long_run):
    text = json.dumps(long_run.window(points=1500), allow_nan=False)
    assert len(text) < 2_000_000
