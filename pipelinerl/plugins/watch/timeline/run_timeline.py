"""`RunTimeline`: what each part of a run (a lane) did over time; any window can be queried while the run is live.

    timeline = RunTimeline()
    for event in log: timeline.feed(event)
    timeline.window(0.0, 3600.0, points=1500)       # plain values, as returned by `GET /api/timeline`

Feeding an event takes microseconds and a window milliseconds, for any length of run. In memory, a span takes 26 bytes
and a traced group about 300. A step has three spans, one more if it is published, and two for each engine that receives
its weights. Callers that use several threads must hold a lock.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from pipelinerl.observability.events import Event
from pipelinerl.plugins.watch.timeline.spans import (
    CHECKPOINT,
    ENGINE,
    EVALUATION,
    PUBLICATION,
    TRAINER,
    RunMark,
    Span,
    SpanReader,
    TracedGroup,
)

#: Maximum number of marks that are kept (`_MARKS`), and of marks, groups and points that are drawn in one window.
_MARKS: Final = 20_000
MOST_MARKS: Final = 500
MOST_GROUPS: Final = 256
MOST_POINTS: Final = 8000

#: The tracks (kinds of activity) of each kind of lane, in display order; engines come first, sorted by URL.
_TRACKS: Final = {
    ENGINE: ("serves", "pause", "away"),
    TRAINER: ("step", "wait", "publish_wait"),
    PUBLICATION: ("publish",),
    EVALUATION: ("evaluation",),
    CHECKPOINT: ("checkpoint", "stall"),
}

#: Maximum number of distinct notes per track; further notes are dropped.
_NOTES: Final = 4096


@dataclass(slots=True)
class Track:
    """The spans of one activity in one lane, in append-only columns that can be drawn quickly at any resolution.

    The spans of a track are in order of time and do not overlap, so a window is found by bisection. Spans shorter than
    a cell (the time that one point of the drawing covers) are merged with their neighbours in the cell, so a drawing
    has at most two spans per cell.
    """

    _start: array[float] = field(default_factory=lambda: array("d"))
    _end: array[float] = field(default_factory=lambda: array("d"))
    _value: array[int] = field(default_factory=lambda: array("q"))
    _note: array[int] = field(default_factory=lambda: array("H"))
    _notes: dict[str, int] = field(default_factory=lambda: {"": 0})

    def __len__(self) -> int:
        return len(self._start)

    def add(self, span: Span) -> None:
        """Append a span, which must not start before the previous one has ended."""
        if len(self._notes) < _NOTES:
            self._notes.setdefault(span.note, len(self._notes))
        self._start.append(span.start)
        self._end.append(span.end)
        self._value.append(span.value)
        self._note.append(self._notes.get(span.note, 0))

    def window(self, start: float, end: float, *, cell: float, unended: Span | None = None) -> dict[str, list[Any]]:
        """Return the spans that touch [start, end], in columns; those shorter than `cell` seconds are merged by cell.

        Columns: start, end, value, count, busy, note. A row merges `count` spans, which last `busy` seconds together;
        `value` and `note` are those of the longest span. `unended`, a span still in progress, is appended if it lies in
        the window.
        """
        starts, ends = np.array(self._start), np.array(self._end)
        first, last = int(np.searchsorted(ends, start, "right")), int(np.searchsorted(starts, end, "left"))
        starts, ends = starts[first:last], ends[first:last]
        drawn: dict[str, list[Any]] = {name: [] for name in ("start", "end", "count", "busy", "value", "note")}
        if starts.size:
            lengths = ends - starts
            cells, short = np.floor((starts - start) / cell), lengths < cell
            alone = np.ones(starts.size, bool)  # true for each span that begins a row of the result
            alone[1:] = ~(short[1:] & short[:-1] & (cells[1:] == cells[:-1]))
            rows = np.flatnonzero(alone)
            lasts = np.append(rows[1:], starts.size) - 1
            # Sort spans by (row, length), so that the longest span of each row comes last.
            longest = np.lexsort((lengths, np.cumsum(alone)))[lasts]
            names = list(self._notes)
            drawn = {
                "start": starts[rows].tolist(),
                "end": ends[lasts].tolist(),
                "count": (lasts - rows + 1).tolist(),
                "busy": np.add.reduceat(lengths, rows).tolist(),
                "value": np.array(self._value)[first:last][longest].tolist(),
                "note": [names[number] for number in np.array(self._note)[first:last][longest].tolist()],
            }
        if unended is not None and unended.start < end and unended.end > start:
            row = {"count": 1, "busy": unended.end - unended.start, **unended._asdict()}
            for name, column in drawn.items():
                column.append(row[name])
        return drawn


@dataclass(slots=True)
class RunTimeline:
    """The timeline of one run, built from its events in log order."""

    _reader: SpanReader = field(default_factory=SpanReader)
    _tracks: dict[tuple[str, str], Track] = field(default_factory=dict)
    _marks: deque[RunMark] = field(default_factory=lambda: deque(maxlen=_MARKS))
    # The groups by rising `trained`, and the longest time from a group's claim to its step.
    _groups: list[TracedGroup] = field(default_factory=list)
    _longest_s: float = 0.0

    def feed(self, event: Event) -> None:
        for drawn in self._reader.read(event):
            if isinstance(drawn, Span):
                self._tracks.setdefault((drawn.lane, drawn.track), Track()).add(drawn)
            elif isinstance(drawn, RunMark):
                self._marks.append(drawn)
            else:
                # A group's stages may arrive after those of a later step; rising times can be bisected.
                trained = max(drawn.trained, self._groups[-1].trained) if self._groups else drawn.trained
                self._groups.append(drawn._replace(trained=trained))
                self._longest_s = max(self._longest_s, trained - drawn.claimed)

    def window(self, start: float | None = None, end: float | None = None, *, points: int = 1500) -> dict[str, Any]:
        """Return the data to draw [start, end] in seconds (None: the run's start or end) at a width of `points`."""
        start = max(0.0, start or 0.0)
        end = self._reader.now if end is None else end
        end = max(end, start + 1e-6)
        cell = (end - start) / min(MOST_POINTS, max(1, points))
        unended = {(span.lane, span.track): span for span in self._reader.open()}
        ours = [kind for kind in _TRACKS if kind != ENGINE]
        engines = sorted({lane for lane, _ in [*self._tracks, *unended]}.difference(ours))
        nothing = Track()
        lanes = [
            {
                "lane": lane,
                "kind": kind,
                "tracks": [
                    {
                        "kind": track,
                        **self._tracks.get((lane, track), nothing).window(
                            start, end, cell=cell, unended=unended.get((lane, track))
                        ),
                    }
                    for track in _TRACKS[kind]
                ],
            }
            for kind, lane in [*((ENGINE, lane) for lane in engines), *((kind, kind) for kind in ours)]
        ]
        marks = [list(mark) for mark in self._marks if start <= mark.at <= end]
        return {
            "from": start,
            "to": end,
            "end": self._reader.now,
            "resolution": cell,
            "lanes": lanes,
            "marks": marks[-MOST_MARKS:],
            "groups": self._groups_between(start, end),
        }

    def _groups_between(self, start: float, end: float) -> dict[str, Any]:
        """Return the groups in progress in [start, end], every n-th if they are too many, and their number, `total`."""
        first = bisect_left(self._groups, start, key=lambda group: group.trained)
        last = bisect_right(self._groups, end + self._longest_s, key=lambda group: group.trained)
        touching = [group for group in self._groups[first:last] if group.claimed <= end]
        chosen = touching[:: max(1, -(-len(touching) // MOST_GROUPS))]
        columns = ("engine", "order", "step", "claimed", "sampled", "verified", "trained", "spans")
        return {"total": len(touching), **{name: [getattr(group, name) for group in chosen] for name in columns}}
