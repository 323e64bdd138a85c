"""Traces of finished, live, killed and resumed runs follow the rules of Chrome's trace format."""

import io
import json
from collections import Counter, defaultdict
from itertools import pairwise

import pytest

from pipelinerl.plugins.watch.timeline.chrome_trace import ChromeTrace, write_trace
from tests.observability.synthetic import events as synthetic
from tests.plugins.watch.timeline.events_of_a_run import A, B, event, run, stages, step

Track = tuple[int, int]

RUNS = {
    "finished": run(12),
    "live": run(12, ended=False),
    "resumed": [*run(6, ended=False), event("run_started", 16.0), *run(6)],
    "without groups": synthetic(60),
    "empty": [],
    "no duration": [event("run_started", 0.0), step(1, 0.0)],
    "clocks apart": [*run(2, ended=False), step(3, 12.0) | {"stages": [stages(6, 400.0), stages(7, -400.0)]}],
}


def _trace(events):
    file = io.StringIO()
    count = write_trace(ChromeTrace(), events, file, run="tiny")
    whole = json.loads(file.getvalue())
    assert whole["otherData"] == {"run": "tiny"} and len(whole["traceEvents"]) == count
    return list(whole["traceEvents"])


def _spans(trace):
    tracks = defaultdict(list)
    for each in trace:
        if each["ph"] == "X":
            tracks[each["pid"], each["tid"]].append((each["ts"], each["ts"] + each["dur"], each["name"]))
    return tracks


@pytest.mark.parametrize("name", RUNS)
def test_trace_follows_the_rules_of_chromes_trace_format(name):
    trace = _trace(RUNS[name])
    named = {(each["pid"], each["tid"]) for each in trace if each["name"] == "thread_name"}
    processes = Counter(each["pid"] for each in trace if each["name"] == "process_name")
    assert set(processes.values()) == {1}, "each process is named once"
    spans = _spans(trace)
    assert set(spans) <= named and {pid for pid, _ in named} <= set(processes)
    for each in spans.values():
        assert all(end > start >= 0 for start, end, _ in each)
        assert all(before[1] <= after[0] for before, after in pairwise(each)), "file order is time order, too"
    flows = defaultdict(list)
    for each in trace:
        assert each["ph"] in "XMistf" and isinstance(each["pid"], int) and isinstance(each["tid"], int)
        assert each["ph"] == "M" or isinstance(each["ts"], int)
        if each["ph"] in "stf":
            flows[each["id"]].append(each)
            covering = spans[each["pid"], each["tid"]]
            assert any(start <= each["ts"] < end for start, end, _ in covering), each
    for points in flows.values():
        assert [point["ph"] for point in points] == ["s", *["t"] * (len(points) - 2), "f"]
        assert all(before["ts"] <= after["ts"] for before, after in pairwise(points))
        assert points[-1]["bp"] == "e"


def _flows(trace, name):
    """Return, for each flow (chain of arrows) of that name, the names of the spans that it connects."""
    spans, flows = _spans(trace), defaultdict(list)
    for each in trace:
        if each["ph"] in "stf" and each["name"] == name:
            covering = spans[each["pid"], each["tid"]]
            flows[each["id"]] += [span for start, end, span in covering if start <= each["ts"] < end]
    return list(flows.values())


def test_trace_connects_sampling_verification_and_waiting_of_a_group_by_arrows_with_its_training_step():
    assert _flows(_trace(run(3)), "order 4") == [["sampling", "verification", "waiting for its step", "step 2"]]


def test_trace_connects_a_training_step_by_arrows_with_its_weight_publication_and_both_engines():
    trace = _trace(run(3))
    assert sorted(_flows(trace, "v2")) == [["publish 2", "v2"], ["publish 2", "v2"], ["step 2", "publish 2"]]
    names = {each["args"]["name"] for each in trace if each["name"] == "process_name"}
    assert names == {"run", "trainer", "publication", "evaluation", "checkpoint", "groups", A, B}


def test_trace_draws_at_most_32_overlapping_groups_in_separate_rows_and_counts_those_left_out():
    many = step(1, 10.0) | {"orders": list(range(40)), "stages": [stages(order, 9.0) for order in range(40)]}
    trace = ChromeTrace()
    made = list(trace.events([*run(0, ended=False), many]))
    assert trace.left_out == 8
    assert sum(each["ph"] == "X" and each["name"] == "sampling" for each in made) == 32


def test_hostile_event_text_is_unchanged_in_the_trace():
    hostile = '"}]}</script>\u202e\x1b[31m{0.__class__}'
    (mark,) = (
        each for each in _trace([event("engine_lost", 1.0, url="u", reason=hostile)]) if each["ph"] == "i"
    )  # fmt: skip
    assert hostile in mark["name"]
