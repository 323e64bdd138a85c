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
from numpy.typing import NDArray

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
        columns = _merged(starts, ends, start=start, cell=cell)
        longest, names = columns.pop("longest"), list(self._notes)
        drawn: dict[str, list[Any]] = {name: column.tolist() for name, column in columns.items()}
        drawn["value"] = np.array(self._value)[first:last][longest].tolist()
        drawn["note"] = [names[number] for number in np.array(self._note)[first:last][longest].tolist()]
        if unended is not None and unended.start < end and unended.end > start:
            _append(drawn, unended)
        return drawn


def _merged(
    starts: NDArray[np.float64], ends: NDArray[np.float64], *, start: float, cell: float
) -> dict[str, NDArray[Any]]:
    """Merge spans shorter than `cell` seconds that begin in the same cell; cells are counted from `start`.

    Return the columns start, end, count and busy of `Track.window`, and `longest`: for each row, the index (in `starts`
    and `ends`) of the longest span that the row merges.
    """
    lengths = ends - starts
    if starts.size == 0:
        empty = np.zeros(0, np.int64)
        return {"start": starts, "end": ends, "count": empty, "busy": lengths, "longest": empty}
    cells = np.floor((starts - start) / cell)
    short = lengths < cell
    alone = np.ones(starts.size, bool)  # true for each span that begins a row of the result
    alone[1:] = ~(short[1:] & short[:-1] & (cells[1:] == cells[:-1]))
    rows = np.flatnonzero(alone)
    lasts = np.append(rows[1:], starts.size) - 1
    # Sort spans by (row, length), so that the longest span of each row comes last.
    order = np.lexsort((lengths, np.cumsum(alone)))
    return {
        "start": starts[rows],
        "end": ends[lasts],
        "count": lasts - rows + 1,
        "busy": np.add.reduceat(lengths, rows),
        "longest": order[lasts],
    }


def _append(drawn: dict[str, list[Any]], span: Span) -> None:
    row = {
        "start": span.start, "end": span.end, "count": 1, "busy": span.end - span.start, "value": span.value,
        "note": span.note,
    }  # fmt: skip
    for name, value in row.items():
        drawn[name].append(value)


@dataclass(slots=True)
class _Groups:
    order: array[int] = field(default_factory=lambda: array("q"))
    step: array[int] = field(default_factory=lambda: array("q"))
    engine: array[int] = field(default_factory=lambda: array("i"))
    claimed: array[float] = field(default_factory=lambda: array("d"))
    sampled: array[float] = field(default_factory=lambda: array("d"))
    verified: array[float] = field(default_factory=lambda: array("d"))
    trained: array[float] = field(default_factory=lambda: array("d"))
    spans: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    engines: dict[str, int] = field(default_factory=dict)
    longest_s: float = 0.0

    def add(self, group: TracedGroup) -> None:
        self.order.append(group.order)
        self.step.append(group.step)
        self.engine.append(self.engines.setdefault(group.engine, len(self.engines)))
        self.claimed.append(group.claimed)
        self.sampled.append(group.sampled)
        self.verified.append(group.verified)
        # A group's stages may arrive after those of a later step. Keep the column non-decreasing, so it can be
        # bisected.
        trained = max(group.trained, self.trained[-1]) if self.trained else group.trained
        self.trained.append(trained)
        self.spans.append(group.spans)
        self.longest_s = max(self.longest_s, trained - group.claimed)

    def window(self, start: float, end: float) -> dict[str, Any]:
        """Return the groups in progress between `start` and `end`, in columns, and their number, `total`.

        Of more than `MOST_GROUPS` groups, only every n-th is returned.
        """
        first, last = bisect_left(self.trained, start), bisect_right(self.trained, end + self.longest_s)
        touching = first + np.flatnonzero(np.array(self.claimed[first:last]) <= end)
        each = max(1, -(-touching.size // MOST_GROUPS))
        chosen, names = touching[::each].tolist(), list(self.engines)
        columns = ("order", "step", "claimed", "sampled", "verified", "trained", "spans")
        drawn = {name: [getattr(self, name)[place] for place in chosen] for name in columns}
        return {"total": int(touching.size), "engine": [names[self.engine[place]] for place in chosen], **drawn}


@dataclass(slots=True)
class RunTimeline:
    """The timeline of one run, built from its events in log order."""

    _reader: SpanReader = field(default_factory=SpanReader)
    _tracks: dict[tuple[str, str], Track] = field(default_factory=dict)
    _marks: deque[RunMark] = field(default_factory=lambda: deque(maxlen=_MARKS))
    _groups: _Groups = field(default_factory=_Groups)

    def feed(self, event: Event) -> None:
        """Add the next event of the log."""
        for drawn in self._reader.read(event):
            if isinstance(drawn, Span):
                self._tracks.setdefault((drawn.lane, drawn.track), Track()).add(drawn)
            elif isinstance(drawn, RunMark):
                self._marks.append(drawn)
            else:
                self._groups.add(drawn)

    def window(self, start: float | None = None, end: float | None = None, *, points: int = 1500) -> dict[str, Any]:
        """Return the data to draw the interval [start, end] at a width of `points`.

        `start` and `end` are in seconds; None means the run's start or end.
        """
        start = max(0.0, start or 0.0)
        end = self._reader.now if end is None else end
        end = max(end, start + 1e-6)
        cell = (end - start) / min(MOST_POINTS, max(1, points))
        unended = {(span.lane, span.track): span for span in self._reader.open()}
        lanes = [
            {
                "lane": lane,
                "kind": kind,
                "tracks": [
                    {
                        "kind": track,
                        **self._tracks.get((lane, track), _NOTHING).window(
                            start, end, cell=cell, unended=unended.get((lane, track))
                        ),
                    }
                    for track in _TRACKS[kind]
                ],
            }
            for kind, lane in self._lanes(set(unended))
        ]
        marks = [list(mark) for mark in self._marks if start <= mark.at <= end]
        return {
            "from": start,
            "to": end,
            "end": self._reader.now,
            "resolution": cell,
            "lanes": lanes,
            "marks": marks[-MOST_MARKS:],
            "groups": self._groups.window(start, end),
        }

    def _lanes(self, unended: set[tuple[str, str]]) -> list[tuple[str, str]]:
        named = {lane for lane, _ in [*self._tracks, *unended]}
        ours = [kind for kind in _TRACKS if kind != ENGINE]
        return [(ENGINE, lane) for lane in sorted(named.difference(ours))] + [(kind, kind) for kind in ours]


_NOTHING: Final = Track()
