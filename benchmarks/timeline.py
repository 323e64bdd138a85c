"""A run of 10⁵ steps over time: what a window costs, and a trace; and what it costs a run to tell its stages.

    events      fed to `RunTimeline`, and to a trace, one run of two engines, four traced groups a step
    windows     the whole run, an hour of it and a minute, on 1500 points
    stages      an actor's notes of one group; the bytes that a step's event grows by, as a share of the event

Processor time, since the machine is shared.
"""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.measure import Row, print_table, write_record
from inference_contract.schemas import AssistantMessage, Choice, FinishReason
from pipelinerl.actor.stages import StageLog
from pipelinerl.commands.exports import trace_run
from pipelinerl.observability.timeline.run_timeline import RunTimeline
from pipelinerl.types import Message, Problem, PromptOrder, Purpose, Sampling

_STEPS: Final = 100_000
_ENGINES: Final = ("http://127.0.0.1:4001", "http://127.0.0.1:4002")
_BEGAN: Final = 1.76e9
#: Orders of a step, and of them those whose stages are told.
_GROUPS, _TOLD = 32, 4


def run(quick: bool) -> dict[str, Any]:
    """Measure, print, write the record."""
    steps = _STEPS // 20 if quick else _STEPS
    timeline = RunTimeline()
    fed_s = _cpu(lambda: deque(map(timeline.feed, _events(steps)), maxlen=0))
    made_s = _cpu(lambda: deque(_events(steps), maxlen=0))
    windows = {
        name: min(_cpu(lambda first=first, last=last: timeline.window(first, last)) for _ in range(5))  # type: ignore[misc]
        for name, first, last in (("run", 0.0, float(steps)), ("hour", 1000.0, 4600.0), ("minute", 1000.0, 1060.0))
    }
    answer = len(json.dumps(timeline.window()))
    with tempfile.TemporaryDirectory() as place:
        run_dir = Path(place)
        with (run_dir / "events.jsonl").open("w") as file:
            file.writelines(json.dumps(event) + "\n" for event in _events(steps))
        traced_s = _cpu(lambda: trace_run(run_dir, None))
        trace_bytes = (run_dir / "trace.json.gz").stat().st_size
        with gzip.open(run_dir / "trace.json.gz", "rt") as trace:
            spans = sum('"ph":"X"' in line for line in trace)
    note_s, grown = _noted_s(2_000 if quick else 20_000), _grown()
    record = {
        "steps": steps,
        "feed_us_per_step": 1e6 * (fed_s - made_s) / steps,
        "window_s": windows,
        "answer_bytes": answer,
        "trace_us_per_step": 1e6 * traced_s / steps,
        "trace_bytes": trace_bytes,
        "trace_spans": spans,
        "stages_us_per_group": 1e6 * note_s,
        "step_event_grows": grown,
    }
    print_table(
        f"timeline of {steps:,} steps",
        [
            Row("feed [µs a step]", record["feed_us_per_step"]),
            *(Row(f"window of a {name} [ms]", 1e3 * seconds) for name, seconds in windows.items()),
            Row("answer [KiB]", answer / 1024),
            Row("trace [µs a step]", record["trace_us_per_step"]),
            Row("trace [MiB]", trace_bytes / 2**20),
            Row("stages [µs a group]", record["stages_us_per_group"]),
            Row("a step's event grows by [%]", 100 * grown),
        ],
    )
    write_record("timeline", record)
    return record


def _cpu(call: Callable[[], Any]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def _events(steps: int) -> Iterator[dict[str, Any]]:
    def event(kind: str, at: float, **fields: Any) -> dict[str, Any]:
        return {"time": _BEGAN + at, "kind": kind, "elapsed_s": at, **fields}

    yield event("run_started", 0.0, run="long")
    yield from (event("engine_joined", 0.1, url=url) for url in _ENGINES)
    for step in range(1, steps + 1):
        at, first = float(step), step * _GROUPS
        yield event("engines", at - 0.1, tokens_per_s=9000.0, occupancy=0.9, running=100, waiting=4)
        yield event(
            "step", at, step=step, model_version=step, orders=list(range(first, first + _GROUPS)), wait_s=0.2,
            step_s=0.7, publish_wait_s=0.02, stages=[_stages(first + place, at) for place in range(_TOLD)],
        )  # fmt: skip
        pauses = dict.fromkeys(_ENGINES, 0.002)
        yield event("publish", at + 0.05, model_version=step, total_s=0.04, pause_s=0.002, pauses_s=pauses, failed={})
        if step % 1000 == 0:
            yield event("evaluation_began", at + 0.06, model_version=step)
            yield event("evaluation", at + 0.09, model_version=step, name="held_out", accuracy=0.5)


def _stages(order: int, at: float) -> list[Any]:
    times = [_BEGAN + at - behind for behind in (1.7, 0.9, 0.8)]
    return [order, *times, _ENGINES[order % 2], [[order // _GROUPS - 1, 300], [order // _GROUPS, 212]]]


def _grown() -> float:
    """Bytes of `stages`, of `publish_wait_s` and of `pauses_s`, as a share of a step's events without them."""
    _, _, _, _, step, publish = (event for event, _ in zip(_events(1), range(6), strict=False))
    figures = {f"figure_{number}": 0.12345678901234567 for number in range(80)}  # as many as a real step has
    whole = len(json.dumps(step | figures)) + len(json.dumps(publish))
    new = len(json.dumps(step["stages"])) + len(json.dumps(publish["pauses_s"])) + len('"publish_wait_s":0.0123456789')
    return new / (whole - new)


def _noted_s(groups: int) -> float:
    """Of an actor, for each of its groups, drawn or not; a heartbeat takes them every 200 groups."""
    log, spans = StageLog(), [_choice().version_spans or () for _ in range(8)]
    orders = [_order(number) for number in range(groups)]

    def note() -> None:
        for number, order in enumerate(orders):
            with log.claimed(order):
                log.sampled(order, _ENGINES[0])
                log.verified(order, spans)
            if number % 200 == 0:
                log.take()

    return min(_cpu(note) for _ in range(5)) / groups


def _choice() -> Choice:
    message = AssistantMessage(content="x")
    return Choice(
        index=0, message=message, finish_reason=FinishReason.STOP, token_ids=[1] * 512, version_spans=[(1, 512)]
    )


def _order(number: int) -> PromptOrder:
    return PromptOrder(
        order_id=f"prompt-{number}",
        index=number,
        purpose=Purpose.TRAINING,
        problem=Problem(problem_id="p", domain="d", messages=(Message("user", "q"),), ground_truth="a"),
        sampling=Sampling(num_samples=8),
        seed=number,
    )
