"""`StepTable`: every metric of every step, in bounded memory, and queries that merge rows to fit a screen.

Numbers are stored in single precision. If a run exceeds `MOST_NUMBERS`, the older half is thinned: of every four rows
two remain, with the minimum and maximum of each metric in their original order. Outliers therefore stay visible for any
length of run and any number of points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipelinerl.observability.events import Event, amount
from pipelinerl.observability.run_history import sampling_version

Float64 = NDArray[np.float64]
Float32 = NDArray[np.float32]

#: Maximum number of stored values (metrics times rows): 128 MiB.
MOST_NUMBERS: Final = 2**25
#: Maximum number of distinct metrics; a recipe has about a dozen for each domain and tag.
MOST_FIGURES: Final = 2048
_MOST_NAME: Final = 200
_ROWS: Final = 4096
#: Fields that give a step's position in the run; they are not drawn as curves.
_PLACES: Final = frozenset({"time", "elapsed_s", "step", "model_version", "decision", "epoch", "sampled_version"})
_LARGEST: Final = 1e300
_PLACE: Final = ("step", "elapsed_s", "samples", "tokens", "sampled_version")


@dataclass(slots=True)
class _Chunk:
    """Up to `_ROWS` steps: their positions (`_PLACE`) in `places` [5, rows], metrics in `figures` [metrics, rows]."""

    places: Float64
    figures: Float32
    count: int

    @classmethod
    def empty(cls, columns: int) -> _Chunk:
        return cls(np.zeros((len(_PLACE), _ROWS)), np.full((max(64, columns), _ROWS), np.nan, np.float32), 0)

    def widen(self, columns: int) -> None:
        """Extend `figures` to more than `columns` metrics, for metrics that occur for the first time."""
        more = np.full((columns + 32 - len(self.figures), self.figures.shape[1]), np.nan, np.float32)
        self.figures = np.concatenate([self.figures, more])

    def between(self, first: int, last: int) -> _Chunk:
        start = int(np.searchsorted(self.places[0, : self.count], first))
        end = max(start, int(np.searchsorted(self.places[0, : self.count], last, side="right")))
        return _Chunk(self.places[:, start:end], self.figures[:, start:end], end - start)

    def column(self, index: int) -> Float32:
        if index >= len(self.figures):
            return np.full(self.count, np.nan, np.float32)
        return self.figures[index, : self.count]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """Rows of a table. Each row merges `each` consecutive steps and has the position of the last one.

    Attributes:
        places: `step`, `elapsed_s`, the cumulative `samples` and `tokens` trained on, and `sampled_version`, the
            mean version that sampled the batch, but never less than that of an earlier row; [n] each.
        means, lows, highs: by metric, [n]; NaN if no step of the row has the metric.
    """

    each: int
    places: Mapping[str, Float64]
    means: Mapping[str, Float64]
    lows: Mapping[str, Float64]
    highs: Mapping[str, Float64]


class StepTable:
    """Table of steps, added in log order. If a step is added again, its row and all later rows are removed first."""

    def __init__(self, *, most_numbers: int = MOST_NUMBERS) -> None:
        self._most_numbers = most_numbers
        self._columns: dict[str, int] = {}
        self._chunks: list[_Chunk] = []

    @property
    def figures(self) -> list[str]:
        """Names of the metrics, such as `reward`, `domain/<name>/accuracy`, `tag/<name>/accuracy`."""
        return sorted(self._columns)

    @property
    def count(self) -> int:
        return sum(chunk.count for chunk in self._chunks)

    @property
    def bounds(self) -> tuple[int, int]:
        """The first and the last step in the table; (0, 0) if it is empty."""
        if not self.count:
            return 0, 0
        return int(self._chunks[0].places[0, 0]), int(self._chunks[-1].places[0, self._chunks[-1].count - 1])

    def add(self, event: Event) -> bool:
        """Add a `step` event; return True if it repeats an earlier step, so that later rows were removed."""
        step = event.get("step")
        if type(step) is not int or not 0 <= step < 2**53:
            return False
        again = bool(self._chunks) and step <= self.bounds[1]
        while again and self._chunks:
            chunk = self._chunks[-1]
            chunk.count = int(np.searchsorted(chunk.places[0, : chunk.count], step))
            if chunk.count:
                break
            self._chunks.pop()
        samples, tokens, sampled = (
            self._chunks[-1].places[2:, self._chunks[-1].count - 1] if self._chunks else (0, 0, 0)
        )
        if not self._chunks or self._chunks[-1].count == _ROWS:
            if (self.count + _ROWS) * max(64, len(self._columns)) > self._most_numbers and len(self._chunks) >= 4:
                half = len(self._chunks) // 4 * 2
                pairs = zip(self._chunks[0:half:2], self._chunks[1:half:2], strict=True)
                self._chunks[:half] = [_thinned(first, second, len(self._columns)) for first, second in pairs]
            self._chunks.append(_Chunk.empty(len(self._columns)))
        chunk = self._chunks[-1]
        indexes, numbers = self._row(event)
        if indexes and max(indexes) >= len(chunk.figures):
            chunk.widen(max(indexes) + 1)
        chunk.places[:, chunk.count] = (
            step,
            amount(event, "elapsed_s"),
            samples + amount(event, "rollouts"),
            tokens + amount(event, "sampled_tokens"),
            max(sampled, sampling_version(event)),
        )
        with np.errstate(over="ignore"):
            chunk.figures[:, chunk.count] = np.nan
            chunk.figures[indexes, chunk.count] = numbers
        chunk.count += 1
        return again

    def rows(
        self, figures: Sequence[str], *, points: int, first: int = 0, last: int = 2**53, since: int = -1
    ) -> StepRows:
        """Return the steps from `first` to `last` that come after `since`, merged to at most `points` rows."""
        lowest = max(first, since + 1)
        parts = [part for chunk in self._chunks if (part := chunk.between(lowest, last)).count]
        count = sum(part.count for part in parts)
        each = max(1, -(-count // points))
        starts = np.arange(0, count, each)
        places = np.concatenate([np.zeros((len(_PLACE), 0)), *(part.places for part in parts)], axis=1)
        ends = np.minimum(starts + each, count) - 1
        positions = {name: places[number][ends] for number, name in enumerate(_PLACE)}
        known = {name: index for name in figures if (index := self._columns.get(name)) is not None}
        if each == 1:  # without merging, the columns of all metrics can be gathered together
            means = dict(zip(known, _columns_of(parts, list(known.values())), strict=True))
            return StepRows(each=each, places=positions, means=means, lows=means, highs=means)
        merged = {name: _merged(_columns_of(parts, [index])[0], starts) for name, index in known.items()}
        means, lows, highs = ({name: column[part] for name, column in merged.items()} for part in range(3))
        return StepRows(each=each, places=positions, means=means, lows=lows, highs=highs)

    def _row(self, event: Event) -> tuple[list[int], list[float]]:
        tables: list[tuple[str, Any]] = [("", {name: each for name, each in event.items() if name not in _PLACES})]
        for field, label in (("by_domain", "domain"), ("by_tag", "tag")):
            by = event.get(field)
            tables += [(f"{label}/{who}/", each) for who, each in by.items()] if isinstance(by, dict) else []
        indexes, numbers = [], []
        for prefix, figures in tables:
            for name, value in figures.items() if isinstance(figures, dict) else ():
                if type(value) not in (float, int) or not -_LARGEST < value < _LARGEST:
                    continue
                index = self._columns.get(prefix + name)
                if index is None:
                    if len(self._columns) >= MOST_FIGURES or len(prefix + name) > _MOST_NAME:
                        continue
                    index = self._columns[prefix + name] = len(self._columns)
                indexes.append(index)
                numbers.append(value)
        return indexes, numbers


def _columns_of(parts: Sequence[_Chunk], indexes: Sequence[int]) -> Float64:
    """Return the metrics `indexes` in all rows of `parts`, [indexes, rows]; NaN where they are missing or infinite."""
    columns = np.full((len(indexes), sum(part.count for part in parts)), np.nan)
    end = 0
    for part in parts:
        known = [place for place, index in enumerate(indexes) if index < len(part.figures)]
        start, end = end, end + part.count
        columns[known, start:end] = part.figures[[indexes[place] for place in known], : part.count]
    columns[~np.isfinite(columns)] = np.nan
    return columns


def _thinned(first: _Chunk, second: _Chunk, columns: int) -> _Chunk:
    places = np.concatenate([chunk.places[:, : chunk.count] for chunk in (first, second)], axis=1)
    thin = _Chunk.empty(columns)
    starts = np.arange(0, places.shape[1], 4)
    ends = np.minimum(starts + 4, places.shape[1])
    thin.count = min(2 * len(starts), _ROWS)
    thin.places[:, 0 : thin.count : 2] = places[:, np.maximum(starts, ends - 3)]
    thin.places[:, 1 : thin.count : 2] = places[:, ends - 1]
    for index in range(columns):
        column = np.concatenate([first.column(index), second.column(index)])
        low, high = np.fmin.reduceat(column, starts), np.fmax.reduceat(column, starts)
        rises = _first_place(column, starts, low) <= _first_place(column, starts, high)
        thin.figures[index, 0 : thin.count : 2] = np.where(rises, low, high)
        thin.figures[index, 1 : thin.count : 2] = np.where(rises, high, low)
    return thin


def _first_place(column: Float32, starts: NDArray[np.int64], wanted: Float32) -> NDArray[np.int64]:
    """Return, for each part of the column, the index of the first entry that equals the part's entry of `wanted`."""
    parts = np.diff(starts, append=len(column))
    there = np.where(column == np.repeat(wanted, parts), np.arange(len(column)), len(column))
    return np.minimum.reduceat(there, starts)


def _merged(column: Float64, starts: NDArray[np.int64]) -> tuple[Float64, Float64, Float64]:
    """Return mean, minimum and maximum of each part of the column, ignoring NaN; parts begin at `starts`."""
    known = np.isfinite(column)
    sums = np.add.reduceat(np.where(known, column, 0.0), starts)
    counts = np.add.reduceat(known.astype(np.float64), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.where(counts > 0, sums / counts, np.nan)
    return means, np.fmin.reduceat(column, starts), np.fmax.reduceat(column, starts)


def plain(values: Float64, digits: int = 6) -> list[float | None]:
    """Return numbers for JSON, rounded to `digits` significant digits; None if not finite."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scale = 10.0 ** (digits - 1 - np.floor(np.log10(np.abs(values))))
        scale = np.where(np.isfinite(scale) & (scale > 0), scale, 1.0)
        rounded = np.round(values * scale) / scale
    return [value if value - value == 0.0 else None for value in rounded.tolist()]


def plain_columns(columns: Mapping[str, Float64]) -> dict[str, list[float | None]]:
    """Apply `plain` to columns of equal length in one call; for short columns, this takes a tenth of the time."""
    if not columns:
        return {}
    values = plain(np.concatenate(list(columns.values())))
    rows = len(values) // len(columns)
    return {name: values[place * rows : (place + 1) * rows] for place, name in enumerate(columns)}
