"""`Track`: spans of one kind in one lane, stored in columns; any window can be drawn quickly at any resolution.

The spans of a track rise and do not overlap, so a window is found by bisection. Spans shorter than a cell of the
drawing are merged with their neighbours in the cell, so a drawing has at most two spans per cell. A span takes 26
bytes.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from pipelinerl.observability.timeline.spans import Span

#: Limit of distinct notes per track; later ones are dropped.
_NOTES: Final = 4096


@final
@dataclass(slots=True)
class Track:
    """Append-only columns of spans."""

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

        Columns: start, end, value, count, busy, note. A row merges `count` spans that cover `busy` seconds of it;
        `value` and `note` are those of the longest. `unended` is appended if it lies in the window.
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
    """Return the columns start, end, count, busy, and `longest`, the index of each row's longest span."""
    lengths = ends - starts
    if starts.size == 0:
        empty = np.zeros(0, np.int64)
        return {"start": starts, "end": ends, "count": empty, "busy": lengths, "longest": empty}
    cells = np.floor((starts - start) / cell)
    short = lengths < cell
    alone = np.ones(starts.size, bool)  # True at the first span of a row
    alone[1:] = ~(short[1:] & short[:-1] & (cells[1:] == cells[:-1]))
    rows = np.flatnonzero(alone)
    lasts = np.append(rows[1:], starts.size) - 1
    # Sorted by (row, length), the longest span of each row comes last.
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
