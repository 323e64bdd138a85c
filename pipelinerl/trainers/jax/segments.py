"""Packed segments as rows of a few fixed shapes.

XLA compiles one program for each shape, so a micro-batch of any length is laid out in R rows of C columns, where R and
C come from short lists: C a power of two that holds the longest segment, R the least of 1, 2, 3, 4, 6, 8, 12, … times
the devices that share the rows. Each segment lies whole in one row, so attention costs R·C² instead of T², and rows can
be divided over devices. A run over ragged batches meets as many programs as it meets shapes (R, C), never one per
length; at most a third of the rows and the rest of the last ones is padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

#: Segment id of padding: it attends to padding alone.
PADDING: Final = -1
_LEAST_COLUMNS: Final = 64


@final
@dataclass(frozen=True, slots=True)
class Rows:
    """Where the T tokens of a micro-batch lie in [R, C].

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
        # First-fit decreasing: at most 22 % more rows than the best packing.
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
        """A column [T] as [R, C], `fill` where there is no token."""
        rows = np.full(self.shape[0] * self.shape[1], fill, dtype=column.dtype)
        rows[self.place] = column
        return rows.reshape(self.shape)

    def collect(self, rows: NDArray[Any]) -> NDArray[Any]:
        """The tokens [T] of [R, C]."""
        return rows.reshape(-1)[self.place]


def _bucket(count: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, 16, … that is not below `count`."""
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power
