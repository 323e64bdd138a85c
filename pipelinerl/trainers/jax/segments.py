"""Packed segments as rows of a few fixed shapes, and attention that never leaves a segment.

XLA compiles one program for each shape, so a micro-batch of any length is laid out in R rows of C columns, where R and
C come from short lists: C a power of two that holds the longest segment, R the least of 1, 2, 3, 4, 6, 8, 12, … times
the devices that share the rows. Each segment lies whole in one row, so attention costs R·C² instead of T², and rows can
be divided over devices. A run over ragged batches meets as many programs as it meets shapes (R, C), never one per
length; at most a third of the rows and the rest of the last ones is padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from pipelinerl.models.jax.decoder import grouped_attention

#: Segment id of padding: it attends to padding alone.
PADDING: Final = -1
_LEAST_COLUMNS: Final = 64
#: Queries whose scores are held at once; longer rows are worked off in blocks, each seeing only what is before it.
_QUERIES_AT_ONCE: Final = 1024


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
    def of(cls, position_ids: NDArray[np.int32], *, multiple: int = 1) -> Rows:
        """Lay out packed segments, whose `position_ids` [T] restart at 0 in each; R is a multiple of `multiple`."""
        starts = np.flatnonzero(position_ids == 0)
        lengths = np.diff(starts, append=len(position_ids))
        columns = max(_LEAST_COLUMNS, 1 << int(lengths.max() - 1).bit_length())
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


def attention_within(segment_ids: Array) -> Callable[[Array, Array, Array, Any], tuple[Array, Any]]:
    """Causal attention inside each segment of rows [R, C]; what `hidden_states` calls `attend`."""
    columns = segment_ids.shape[1]

    def block(start: int, end: int, query: Array, key: Array, value: Array) -> Array:
        before = jnp.arange(end)[None, :] <= jnp.arange(start, end)[:, None]
        same = segment_ids[:, start:end, None] == segment_ids[:, None, :end]
        return grouped_attention(query[:, start:end], key[:, :end], value[:, :end], before & same)

    def attend(query: Array, key: Array, value: Array, state: Any) -> tuple[Array, Any]:
        if columns <= _QUERIES_AT_ONCE:
            return block(0, columns, query, key, value), state
        # A block's scores are computed again in the backward pass: never more than one block's are held.
        replayed = jax.checkpoint(block, static_argnums=(0, 1), policy=jax.checkpoint_policies.nothing_saveable)
        starts = range(0, columns, _QUERIES_AT_ONCE)
        parts = [replayed(start, start + _QUERIES_AT_ONCE, query, key, value) for start in starts]
        return jnp.concatenate(parts, axis=1), state

    return attend
