"""Export of a run's events as a trace in Chrome's format, which Perfetto (https://ui.perfetto.dev) can display.

The trace has a track for each role and engine. It consists of spans (`ph` X), instants (`ph` i) for knobs, alarms and
restarts, and flows (arrows between spans):

    order N      one requested group: sampling ▶ verification ▶ the step that trained it   (a sample of groups, by seed)
    version V    the step that made the version ▶ its publication ▶ each engine that serves it

Guarantees:

- The trace is written in one pass, and memory is bounded for any length of run.
- Within a track, times (µs) never decrease and spans never overlap.
- Each flow has one start and one later end; both lie inside spans.
- The file is complete even if the run is live or has crashed.

Format: "Trace Event Format", Google, 2016; a flow's end binds to the span that encloses it (`bp` e).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any, Final

from pipelinerl.observability.events import Event
from pipelinerl.plugins.watch.timeline.spans import (
    CHECKPOINT,
    EVALUATION,
    PUBLICATION,
    TRAINER,
    RunMark,
    Span,
    SpanReader,
    TracedGroup,
)

#: Number of rows on which overlapping groups are drawn; a group that finds no free row is left out and counted.
_ROWS: Final = 32
#: Number of recent versions kept in memory, so that their steps can be connected with their publications.
_STEPS: Final = 1024
_EVENTS: Final = "events"
_GROUPS: Final = "groups"
#: Processes of the trace, in Perfetto's display order; engines follow.
_PROCESSES: Final = ("run", TRAINER, PUBLICATION, EVALUATION, CHECKPOINT, _GROUPS)
#: Activities that may overlap others of the same lane (one part of the run), each with the name of the separate row on
#: which it is drawn.
_WITHIN: Final = {"pause": "pauses", "publish_wait": "publish_wait", "stall": "stall", "away": "away"}

TraceEvent = dict[str, Any]


@dataclass(slots=True)
class ChromeTrace:
    """Converter from the events of one run, in log order, to trace events."""

    left_out: int = 0
    """Number of groups left out because all rows for groups were occupied."""
    _reader: SpanReader = field(default_factory=SpanReader)
    _ids: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    _processes: dict[str, int] = field(default_factory=dict)
    _rows: list[float] = field(default_factory=lambda: [0.0] * _ROWS)
    # By track, the time (µs) at which its last span ends.
    _ends: dict[tuple[int, int], int] = field(default_factory=dict)
    # By version, a time (µs) within the span of the version's step.
    _steps: dict[int, int] = field(default_factory=dict)
    # By version, a time (µs) within the span of each of its publications.
    _published: dict[int, list[int]] = field(default_factory=dict)

    def events(self, events: Iterable[Event]) -> Iterator[TraceEvent]:
        """Yield all trace events of a run, from the run's `events` in log order."""
        for process in _PROCESSES:
            yield from self._named(process)
        for event in events:
            groups: list[TracedGroup] = []
            for drawn in self._reader.read(event):
                if isinstance(drawn, TracedGroup):
                    groups.append(drawn)
                else:
                    yield from self._span(drawn) if isinstance(drawn, Span) else self._mark(drawn)
            for group in sorted(groups, key=lambda group: group.claimed):
                yield from self._group(group)
        for span in self._reader.open():
            yield from self._span(span, unended=True)

    # --- spans -----------------------------------------------------------------------------------------------------

    def _span(self, span: Span, *, unended: bool = False) -> Iterator[TraceEvent]:
        arguments: dict[str, Any] = {"value": span.value} | ({"note": span.note} if span.note else {})
        arguments |= {"unended": True} if unended else {}
        track = (span.lane, _WITHIN.get(span.track, span.lane))
        name = f"{span.track} {span.value}" if span.value >= 0 else span.track
        if span.track == "serves":
            name = f"v{span.value}" if span.value >= 0 else "no weights yet"
        for event in self._complete(track, name, span.start, span.end, cat=span.track, args=arguments):
            yield event
            if event["ph"] == "X":
                yield from self._version_flow(span, event["ts"])

    def _mark(self, mark: RunMark) -> Iterator[TraceEvent]:
        yield from self._track("run", _EVENTS)
        pid, tid = self._ids["run", _EVENTS]
        yield {
            "ph": "i", "s": "g", "name": mark.words or mark.kind, "cat": mark.kind, "ts": _us(mark.at),
            "pid": pid, "tid": tid,
        }  # fmt: skip

    def _group(self, group: TracedGroup) -> Iterator[TraceEvent]:
        row = next((row for row, until in enumerate(self._rows) if until <= group.claimed), None)
        if row is None:
            self.left_out += 1
            return
        self._rows[row] = group.trained
        track = (_GROUPS, f"row {row:02d}")
        stages = (
            ("sampling", group.claimed, group.sampled),
            ("verification", group.sampled, group.verified),
            ("waiting for its step", group.verified, group.trained),
        )
        spans = ", ".join(f"v{version} × {tokens}" for version, tokens in group.spans)
        arguments = {"order": group.order, "step": group.step, "engine": group.engine, "longest answer": spans}
        made: list[int] = []
        for name, start, end in stages:
            for event in self._complete(track, name, start, end, cat=_GROUPS, args=arguments):
                yield event
                if event["ph"] == "X":
                    made.append(event["ts"])
        if made and (step := self._ids.get((TRAINER, TRAINER))) is not None:
            name, flow = f"order {group.order}", f"order-{group.order}-{group.step}-{made[0]}"
            for place, ts in enumerate(made):
                yield _flow("t" if place else "s", name, flow, ts, self._ids[track])
            yield _flow("f", name, flow, _us(group.ended) - 1, step)

    def _version_flow(self, span: Span, began: int) -> Iterator[TraceEvent]:
        """Yield the arrow that ends at a span: from a step to its publication, or from a publication to an engine."""
        version, last, name = span.value, _us(span.end) - 1, f"v{span.value}"
        if span.track == "step":
            self._steps[version] = last
            _forget(self._steps)
        elif span.track == "publish":
            if (made := self._steps.pop(version, None)) is not None and made <= last:
                yield _flow("s", name, f"version-{version}-{made}", made, self._ids[TRAINER, TRAINER])
                yield _flow("f", name, f"version-{version}-{made}", max(began, made), self._ids[span.lane, span.lane])
            self._published.setdefault(version, []).append(last)
            _forget(self._published)
        elif span.track == "serves":
            sent = max((at for at in self._published.get(version, ()) if at <= began), default=None)
            if sent is not None:
                flow = f"served-{version}-{began}-{span.lane}"
                yield _flow("s", name, flow, sent, self._ids[PUBLICATION, PUBLICATION])
                yield _flow("f", name, flow, began, self._ids[span.lane, span.lane])

    # --- details ---------------------------------------------------------------------------------------------------

    def _complete(
        self, track: tuple[str, str], name: str, start: float, end: float, **rest: Any
    ) -> Iterator[TraceEvent]:
        """Yield a span of at least 1 µs, trimmed to start after the track's last span; nothing if no time is left."""
        yield from self._track(*track)
        pid, tid = self._ids[track]
        ts, until = max(_us(start), self._ends.get((pid, tid), 0)), _us(end)
        if until > ts:
            self._ends[pid, tid] = until
            yield {"ph": "X", "name": name, "ts": ts, "dur": until - ts, "pid": pid, "tid": tid, **rest}

    def _named(self, process: str) -> Iterator[TraceEvent]:
        if process not in self._processes:
            pid = self._processes[process] = len(self._processes) + 1
            for name, arguments in (("process_name", {"name": process}), ("process_sort_index", {"sort_index": pid})):
                yield {"ph": "M", "name": name, "pid": pid, "tid": 0, "args": arguments}

    def _track(self, process: str, name: str) -> Iterator[TraceEvent]:
        if (process, name) not in self._ids:
            yield from self._named(process)
            pid = self._processes[process]
            tid = 1 + sum(known == pid for known, _ in self._ids.values())
            self._ids[process, name] = (pid, tid)
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def write_trace(trace: ChromeTrace, events: Iterable[Event], file: IO[str], *, run: str) -> int:
    """Write the whole trace as JSON and return the number of trace events."""
    count = 0
    file.write('{"displayTimeUnit":"ms","otherData":' + json.dumps({"run": run}) + ',"traceEvents":[\n')
    for count, event in enumerate(trace.events(events), start=1):
        file.write((",\n" if count > 1 else "") + json.dumps(event, separators=(",", ":")))
    file.write("\n]}\n")
    return count


def _flow(phase: str, name: str, flow: str, ts: int, ids: tuple[int, int]) -> TraceEvent:
    bound = {"bp": "e"} if phase == "f" else {}
    return {"ph": phase, "name": name, "cat": "flow", "id": flow, "ts": ts, "pid": ids[0], "tid": ids[1], **bound}


def _forget(held: dict[int, Any]) -> None:
    if len(held) > _STEPS:
        del held[next(iter(held))]


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
