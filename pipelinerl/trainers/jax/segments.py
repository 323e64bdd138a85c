"""Packing of segments into rows of a few fixed shapes.

XLA compiles one program per shape. So a micro-batch of any length is laid out in R rows of C columns, where R and C
come from short lists. C is a power of two that holds the longest segment. R is a number from the list 1, 2, 3, 4, 6, 8,
12, … times the number of devices that share the rows; the smallest sufficient one is used. Each segment lies within one
row, so attention costs R·C² instead of T², and rows can be sharded. A run with ragged batches compiles one program per
shape (R, C), not one per length. Padding is at most a third of the rows, plus the unused ends of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

#: Segment id of padding, which attends only to padding.
PADDING: Final = -1
_LEAST_COLUMNS: Final = 64


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """Positions of the T tokens of a micro-batch in [R, C].

    Attributes:
        shape: (R, C).
        place: i64 [T], index of each token in the flattened rows.
    """

    shape: tuple[int, int]
    place: NDArray[np.int64]

    @classmethod
    def of(cls, position_ids: NDArray[np.int32], *, multiple: int = 1, least_columns: int = _LEAST_COLUMNS) -> Rows:
        """Lay out packed segments, whose `position_ids` [T] restart at 0 in each; R is a multiple of `multiple`."""
        starts = np.flatnonzero(position_ids == 0)
        lengths = np.diff(starts, append=len(position_ids))
        columns = max(least_columns, 1 << int(lengths.max() - 1).bit_length())
        # First-fit decreasing: at most 22 % more rows than the optimum.
        room = np.full(len(lengths), columns)
        offset = np.empty(len(lengths), dtype=np.int64)
        for i in np.argsort(-lengths, kind="stable"):
            row = int(np.argmax(room >= lengths[i]))
            offset[i] = (row + 1) * columns - room[row]
            room[row] -= lengths[i]
        needed = int(np.count_nonzero(room < columns))
        rows = _bucket(-(-needed // multiple)) * multiple
        return cls((rows, columns), np.repeat(offset, lengths) + position_ids)

    def spread(self, column: NDArray[Any], *, fill: Any = 0) -> NDArray[Any]:
        """Copy a column [T] to rows [R, C], with `fill` at padding."""
        rows = np.full(self.shape[0] * self.shape[1], fill, dtype=column.dtype)
        rows[self.place] = column
        return rows.reshape(self.shape)

    def collect(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Return the tokens' values [T] from rows [R, C], the inverse of `spread`."""
        return rows.reshape(-1)[self.place]


def _bucket(count: int) -> int:
    """Return the smallest number of the list 1, 2, 3, 4, 6, 8, 12, 16, … that is at least `count`."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power
