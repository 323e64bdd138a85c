"""Spans and timelines of runs: activities in order, any window at any resolution."""

from itertools import pairwise

import pytest

from pipelinerl.plugins.watch.timeline.run_timeline import MOST_GROUPS, RunTimeline, Track
from pipelinerl.plugins.watch.timeline.spans import RunMark, Span, SpanReader, TracedGroup
from tests.observability.synthetic import events as synthetic
from tests.plugins.watch.timeline.events_of_a_run import STEP_S, A, event, publish, run, stages, step


def _drawn(events):
    reader = SpanReader()
    return reader, [drawn for each in events for drawn in reader.read(each)]


def _spans(events, lane, track):
    return [d for d in _drawn(events)[1] if isinstance(d, Span) and (d.lane, d.track) == (lane, track)]


def test_timeline_shows_that_an_engine_serves_a_version_until_the_next_version_is_published():
    served = _spans(run(3), A, "serves")
    assert [(span.value, span.start) for span in served] == [(-1, 1.0), (0, 4.0), (1, 10.1), (2, 11.1), (3, 12.1)]
    assert [span.end for span in served] == [4.0, 10.1, 11.1, 12.1, 13.0], "the last ends with the run"


def test_suspect_engine_is_shown_to_serve_only_until_it_stops_answering_and_from_its_return_on():
    away = [event("engine_suspect", 20.0, url=A), event("engine_back", 30.0, url=A), event("run_finished", 40.0)]
    served = _spans([*(each for each in run(3) if each["kind"] != "run_finished"), *away], A, "serves")
    assert [(span.value, span.start, span.end) for span in served[-2:]] == [(3, 12.1, 20.0), (3, 30.0, 40.0)]


def test_steps_and_waits_in_the_timeline_have_the_durations_measured_by_the_trainer():
    assert _spans(run(2), "trainer", "step") == [
        Span("trainer", "step", 9.5, 10.0, 1), Span("trainer", "step", 10.5, 11.0, 2)
    ]  # fmt: skip
    assert [(s.start, s.end) for s in _spans(run(2), "trainer", "wait")] == [(9.25, 9.5), (10.25, 10.5)]
    assert [(s.start, s.end) for s in _spans(run(1), "trainer", "publish_wait")] == [(9.9375, 10.0)]


def test_checkpoint_lasts_in_the_timeline_from_its_step_until_it_is_durable():
    assert _spans(run(4), "checkpoint", "checkpoint") == [Span("checkpoint", "checkpoint", 13.0, 13.3, 4)]
    (stall,) = _spans(run(4), "checkpoint", "stall")
    assert (stall.start, stall.end) == (13.0, pytest.approx(13.05))


def _wait(*before, wait_s=4.0, step_stages=()):
    last = event("step", 20.0, step=1, model_version=1, orders=[7], stages=list(step_stages), step_s=1.0, wait_s=wait_s)
    (waited,) = _spans([*before, last], "trainer", "wait")
    return waited.note


def test_timeline_attributes_each_wait_of_the_trainer_to_its_cause():
    began = event("evaluation_began", 15.0, model_version=0)
    assert _wait() == "sampling"
    assert _wait(began) == "evaluation", "the evaluation is still in progress"
    assert _wait(began, event("evaluation", 18.0, model_version=0)) == "evaluation"
    assert _wait(began, event("evaluation", 16.0, model_version=0)) == "sampling", "a quarter is too little"
    lost = event("engine_lost", 14.0, url=A, reason="silence")
    joined, served = event("engine_joined", 2.0, url=A), publish(0, 3.0, A)
    assert _wait(joined, served, lost) == "engines"
    assert _wait(joined, served, lost, event("engine_joined", 18.5, url=A)) == "engines"
    verified = [7, *(1.76e9 + at for at in (10.0, 15.5, 18.9)), A, []]
    assert _wait(step_stages=(verified,)) == "verification"


def test_lost_engine_is_shown_as_away_until_it_rejoins():
    events = [
        *run(1, ended=False),
        event("engine_lost", 12.0, url=A, reason="died"),
        event("engine_joined", 14.0, url=A),
    ]
    assert _spans(events, A, "away") == [Span(A, "away", 12.0, 14.0, -1, "lost: died")]
    assert _spans(events, A, "serves")[-1].end == 12.0


def test_spans_that_were_open_when_a_run_died_end_at_the_last_event_before_its_resume():
    events = [*run(1, ended=False), event("evaluation_began", 11.0, model_version=1), event("run_started", 11.5)]
    assert _spans(events, A, "serves")[-1].end == 11.0
    assert _spans(events, "evaluation", "evaluation")[-1] == Span("evaluation", "evaluation", 4.5, 8.5, 0, "held_out")
    reader, _ = _drawn([*events, event("step", 13.0, step=2, model_version=2, step_s=0.5)])
    assert list(reader.open()) == []


def test_group_is_drawn_at_its_training_step_even_if_another_steps_event_contains_its_stage_times():
    late = step(1, 10.0) | {"stages": []}
    late_step = step(2, 11.0) | {"stages": [stages(2, 9.0), stages(99, 9.0)]}
    groups = [d for d in _drawn([late, late_step])[1] if isinstance(d, TracedGroup)]
    assert groups == [
        TracedGroup(2, 1, A, *(pytest.approx(t) for t in (8.0, 8.8, 8.9)), 9.5, 10.0, ((0, 4), (1, 2)))
    ]  # fmt: skip
    early = step(1, 10.0) | {"orders": []}
    groups = [
        d for d in _drawn([early, step(2, 11.0) | {"orders": [2], "stages": []}])[1] if isinstance(d, TracedGroup)
    ]
    assert [(group.order, group.step) for group in groups] == [(2, 2)]


def test_stage_times_from_an_actor_whose_clock_is_ahead_are_clamped_to_the_start_of_the_step():
    groups = [d for d in _drawn([step(1, 10.0) | {"stages": [stages(2, 60.0)]}])[1] if isinstance(d, TracedGroup)]
    (group,) = groups
    assert group.claimed <= group.sampled <= group.verified <= group.trained == 9.5


def test_timeline_marks_for_events_describe_the_event_in_words():
    marks = [drawn for drawn in _drawn(run(2))[1] if isinstance(drawn, RunMark)]
    assert RunMark(11.6, "knobs", "k = 4 by ann") in marks
    assert RunMark(12.0, "run_finished", "all steps are done") in marks
    assert RunMark(3.0, "trainer_ready", "a trainer started at v0, epoch 1") in marks


@pytest.mark.parametrize(
    "events", [run(40), synthetic(80), run(20, ended=False) + run(20)], ids=["run", "without groups", "resumed"]
)
def test_spans_in_the_same_track_of_the_timeline_are_in_order_and_never_overlap(events):
    tracks = {}
    reader, drawn = _drawn(events)
    for span in [*(each for each in drawn if isinstance(each, Span)), *reader.open()]:
        tracks.setdefault((span.lane, span.track), []).append(span)
    assert len(tracks) >= 6
    for spans in tracks.values():
        assert all(span.start < span.end for span in spans)
        assert all(before.end <= after.start for before, after in pairwise(spans))


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


def test_timeline_window_at_fine_resolution_has_every_span_unchanged():
    steps = _track(_timeline(run(6)).window(9.0, 12.0, points=3000), "trainer", "step")
    assert steps["start"] == [9.5, 10.5, 11.5] and steps["end"] == [10.0, 11.0, 12.0]
    assert steps["value"] == [1, 2, 3] and steps["count"] == [1, 1, 1] and steps["busy"] == [0.5, 0.5, 0.5]


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
