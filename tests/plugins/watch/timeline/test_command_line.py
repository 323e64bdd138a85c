"""`pipelinerl trace` writes a complete file for any run, or fails with one sentence."""

import gzip
import json
import tracemalloc

import pytest

from pipelinerl.errors import UserError
from pipelinerl.plugins.watch.timeline import chrome_trace, spans
from pipelinerl.plugins.watch.timeline.command_line import trace_run
from tests.plugins.watch.timeline.events_of_a_run import publish, run, step


def _leave(run_dir, events, *, torn=""):
    run_dir.mkdir(exist_ok=True)
    with (run_dir / "events.jsonl").open("w") as file:
        file.writelines(json.dumps(each) + "\n" for each in events)
        file.write(torn)
    return run_dir


def test_trace_of_a_crashed_run_with_an_incomplete_log_is_written(tmp_path):
    made = _leave(tmp_path / "run", run(5, ended=False), torn='{"time":1,"kind":"st')
    message = trace_run(made, None)
    trace = json.loads(gzip.decompress((made / "trace.json.gz").read_bytes()))
    assert {"step 5", "publish 5"} <= {each["name"] for each in trace["traceEvents"]}
    assert message.startswith(f"{made / 'trace.json.gz'}: {len(trace['traceEvents'])} trace events")
    assert [path.name for path in made.iterdir() if path.suffix == ".part"] == []


def test_memory_for_a_trace_does_not_grow_with_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(spans, "_ORDERS", 64)  # lowered, because this short run stays below the real limit
    monkeypatch.setattr(chrome_trace, "_STEPS", 64)

    def peak(steps):
        events = (each for number in range(1, steps + 1) for each in (step(number, number), publish(number, number)))
        made = _leave(tmp_path / f"run-{steps}", events)
        tracemalloc.start()
        try:
            trace_run(made, None)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    assert peak(1_000) < peak(500) + 200_000


def test_trace_of_an_unreadable_run_is_rejected_in_one_sentence(tmp_path):
    with pytest.raises(UserError, match="is not a run: it has no events"):
        trace_run(tmp_path, None)
    made = _leave(tmp_path / "run", run(1))
    with pytest.raises(UserError, match="cannot be written: No such file or directory"):
        trace_run(made, tmp_path / "nowhere" / "trace.json")
    with (made / "events.jsonl").open("a") as file:
        file.write("no json\n")
    assert "trace events" in trace_run(made, None), "a damaged line is skipped"
