"""Attention within each segment of packed rows, by JAX's own kernel on TPUs and by masked matmuls elsewhere.

    dense     computes the scores of all pairs of a row, [R, H, C, C] in fp32, for one block of queries at a time, and
              masks scores across segments
    splash    `models.jax_splash`, JAX's kernel for TPUs, which keeps blocks of scores in on-chip memory and skips those
              above the diagonal; not run on a TPU so far

The kernel's backward pass multiplies in bf16, so an fp32 trainer uses `dense`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec as P
from numpy.typing import NDArray

from pipelinerl.plugins.jax.decoder import Attend, grouped_attention
from pipelinerl.plugins.jax.splash import LANES, splash_attention
from pipelinerl.plugins.jax.trainer import mesh as jax_mesh

#: Number of queries per block; the scores of only one block are in memory at a time.
_QUERIES_AT_ONCE: Final = 1024


class PackedAttention(StrEnum):
    """Attention implementations for packed rows: each token attends to earlier tokens of its own segment."""

    DENSE = "dense"
    SPLASH = "splash"

    @classmethod
    def on(cls, platform: str, *, compute: Any, windows: bool = False) -> PackedAttention:
        """Return a platform's default; the kernel's mask cannot depend on the layer, as for sliding `windows`."""
        return cls.SPLASH if platform == "tpu" and compute == jnp.bfloat16 and not windows else cls.DENSE

    @property
    def least_columns(self) -> int:
        """The minimum length of a row in tokens; the lengths of longer rows are powers of two."""
        return LANES if self is PackedAttention.SPLASH else 64

    def within(self, segment_ids: Array, mesh: Mesh) -> Attend:
        """Return an attention function (`attend` of `hidden_states`) for sharded rows [R, C] with these segment ids."""
        return _dense(segment_ids) if self is PackedAttention.DENSE else _splash(segment_ids, mesh)


def _dense(segment_ids: Array) -> Attend:
    columns = segment_ids.shape[1]

    def block(start: int, end: int, query: Array, key: Array, value: Array, reach: Array | None) -> Array:
        distance = jnp.arange(start, end)[:, None] - jnp.arange(end)[None, :]
        before = distance >= 0 if reach is None else (distance >= 0) & (distance < reach)
        same = segment_ids[:, start:end, None] == segment_ids[:, None, :end]
        return grouped_attention(query[:, start:end], key[:, :end], value[:, :end], before & same)

    def attend(query: Array, key: Array, value: Array, state: Any, reach: Array | None = None) -> tuple[Array, Any]:
        if columns <= _QUERIES_AT_ONCE:
            return block(0, columns, query, key, value, reach), state
        # The backward pass recomputes each block's scores, so the scores of only one block are in memory at a time.
        replayed = jax.checkpoint(block, static_argnums=(0, 1), policy=jax.checkpoint_policies.nothing_saveable)
        starts = range(0, columns, _QUERIES_AT_ONCE)
        parts = [replayed(start, start + _QUERIES_AT_ONCE, query, key, value, reach) for start in starts]
        return jnp.concatenate(parts, axis=1), state

    return attend


def _splash(segment_ids: Array, mesh: Mesh) -> Attend:
    rows, heads = P(jax_mesh.ROWS), P(jax_mesh.ROWS, None, "tensor")
    # XLA cannot divide a kernel among devices, so each device computes its own rows and heads.
    divided = jax.shard_map(
        splash_attention, mesh=mesh, in_specs=(heads, heads, heads, rows), out_specs=heads, check_vma=False
    )

    def attend(query: Array, key: Array, value: Array, state: Any) -> tuple[Array, Any]:
        return divided(query, key, value, segment_ids), state

    return attend


#: Segment id of padding, which attends only to padding.
PADDING: Final = -1


@dataclass(frozen=True, slots=True)
class Rows:
    """A layout of T packed tokens in R rows of C columns; `place` i64 [T] has each token's index in the R · C grid."""

    shape: tuple[int, int]
    place: NDArray[np.int64]

    @classmethod
    def of(cls, position_ids: NDArray[np.int32], *, multiple: int = 1, least_columns: int = 64) -> Rows:
        """Lay out packed segments, whose `position_ids` [T] restart at 0 in each; R is a multiple of `multiple`."""
        starts = np.flatnonzero(position_ids == 0)
        lengths = np.diff(starts, append=len(position_ids))
        columns = max(least_columns, 1 << int(lengths.max() - 1).bit_length())
        # First-fit-decreasing bin packing needs at most 22 % more rows than the optimum.
        room = np.full(len(lengths), columns)
        offset = np.empty(len(lengths), dtype=np.int64)
        for i in np.argsort(-lengths, kind="stable"):
            row = int(np.argmax(room >= lengths[i]))
            offset[i] = (row + 1) * columns - room[row]
            room[row] -= lengths[i]
        needed = int(np.count_nonzero(room < columns))
        # `rows` is the smallest number in 1, 2, 3, 4, 6, 8, 12, 16, … that is at least `count`.
        count = -(-needed // multiple)
        power = 1 << (count - 1).bit_length()
        rows = power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power
        return cls((rows * multiple, columns), np.repeat(offset, lengths) + position_ids)

    def spread(self, column: NDArray[Any], *, fill: Any = 0) -> NDArray[Any]:
        """Copy packed values [T] into rows [R, C]; padding gets the value `fill`."""
        rows = np.full(self.shape[0] * self.shape[1], fill, dtype=column.dtype)
        rows[self.place] = column
        return rows.reshape(self.shape)

    def collect(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Copy the tokens' values from rows [R, C] to packed values [T]; the inverse of `spread`."""
        return rows.reshape(-1)[self.place]
