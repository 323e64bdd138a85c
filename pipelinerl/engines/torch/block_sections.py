"""`BlockSections`: which queries meet which block, so that attention of one query per row reads blocks in place.

Scores are computed block by block, and only they are reordered by row: for D dimensions they are D times smaller than
the keys. The blocks of a step form two sections:

    first     every block, with the queries of one of its rows: one product over all blocks in use, in place
    shared    blocks of several rows, with the queries of their other rows, at most 16 at a time

So a prompt that eight answers share is read twice, not eight times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: The most rows that read one copy of a shared block.
_AT_ONCE: Final = 16
#: The largest fraction of blocks in use at which these are copied out, instead of reading all blocks in place.
_SPARSE: Final = 1 / 3


class _Pairs(NamedTuple):
    blocks: NDArray[np.int64]
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSections:
    """Indices of one step over K rows of at most n blocks, N of which are read; G queries share a key head.

    Attributes:
        selected: the blocks to copy out i64 [N], or None for the first N in place.
        num_blocks: N.
        queries: i64 [N], the row whose queries each block meets.
        to_rows: i64 [K · H · G · n], the index of the scores for each row, head and block.
        to_blocks: the inverse, for each block of both sections.
        to_sums: i64 [n · K · H · G], the index of the weighted values for each block of each row.
        shared: i64 [S], the blocks of the second section, and `shared_queries` i64 [S · H · M] the row and head of each
            query; None if no block is shared.
        only: i64 [K], the block of each row if every row has a single block of its own; the three index tensors are
            then empty, because the rows stay in the order of their blocks.
    """

    selected: Tensor | None
    num_blocks: int
    queries: Tensor
    to_rows: Tensor
    to_blocks: Tensor
    to_sums: Tensor
    shared: Tensor | None
    shared_queries: Tensor | None
    only: Tensor | None = None

    @classmethod
    def of(cls, table: NDArray[np.int64], counts: NDArray[np.int64], *, heads: int, group: int) -> BlockSections:
        """Return the sections of rows with the blocks `table` [K, n], of which the first `counts` [K] are a row's."""
        width, per_block = table.shape[1], heads * group
        rows, columns = (np.arange(width) < counts[:, None]).nonzero()
        blocks = table[rows, columns]
        last = int(table.max()) + 1
        firsts = np.full(last, -1)
        firsts[blocks[::-1]] = np.arange(len(blocks))[::-1]  # assign backwards, so that each block keeps its first pair
        used = (firsts >= 0).nonzero()[0]
        selected = None
        if len(used) <= _SPARSE * last:
            new = np.cumsum(firsts >= 0) - 1
            blocks, table, firsts, selected = new[blocks], new[table], firsts[used], torch.from_numpy(used)
        count = len(firsts)
        is_first = firsts[blocks] == np.arange(len(blocks))
        owners = np.maximum(firsts, 0)
        if width == 1 and is_first.all():
            none, own = torch.empty(0, dtype=torch.int64), torch.from_numpy(blocks)
            return cls(
                selected=selected,
                num_blocks=count,
                queries=torch.from_numpy(rows[owners]),
                to_rows=none,
                to_blocks=none,
                to_sums=none,
                shared=None,
                shared_queries=None,
                only=own,
            )
        heads_of, groups_of = np.arange(heads), np.arange(group)
        each = np.arange(per_block)
        to_blocks = ((rows[owners, None] * per_block + each) * width + columns[owners, None]).reshape(-1)
        base = table * per_block  # padding repeats a row's first block; its scores are masked
        stride = np.full_like(base, group)
        shared = shared_queries = None
        total = count * per_block
        if not is_first.all():
            rest = _Pairs(blocks[~is_first], rows[~is_first], columns[~is_first])
            shared_np, place, member, most = _by_block(rest)
            grid_rows, grid_columns = (np.zeros((len(shared_np), most), dtype=np.int64) for _ in range(2))
            grid_rows[place, member], grid_columns[place, member] = rest.rows, rest.columns
            shared = torch.from_numpy(shared_np)
            shared_queries = torch.from_numpy((grid_rows[:, None] * heads + heads_of[:, None]).reshape(-1))
            head_rows = (grid_rows[:, None, :, None] * heads + heads_of[:, None, None]) * group + groups_of
            more = head_rows * width + grid_columns[:, None, :, None]  # [S, H, M, G]
            to_blocks = np.concatenate((to_blocks, more.reshape(-1)))
            base[rest.rows, rest.columns] = total + (place * heads * most + member) * group
            stride[rest.rows, rest.columns] = most * group
            total += more.size
        places = base[..., None, None] + stride[..., None, None] * heads_of[:, None] + groups_of  # shape [K, n, H, G]
        to_rows = places.transpose(0, 2, 3, 1).reshape(-1)
        places[np.arange(width) >= counts[:, None]] = total  # padding refers to the row of zeros after all blocks
        to_sums = places.transpose(1, 0, 2, 3).reshape(-1)
        return cls(
            selected=selected,
            num_blocks=count,
            queries=torch.from_numpy(rows[owners]),
            to_rows=torch.from_numpy(to_rows),
            to_blocks=torch.from_numpy(to_blocks),
            to_sums=torch.from_numpy(to_sums),
            shared=shared,
            shared_queries=shared_queries,
        )

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float, softcap: float | None
    ) -> Tensor:
        """Attend with queries [K, H, G, D] over blocks [.., H, size, D] → [K, H, G, D]. The additive `mask` has the
        shape [K, 1, 1, n · size].
        """
        rows, heads, group, head_dim = query.shape
        size, first = keys.shape[2], self.num_blocks * heads * group
        keys, values = (
            blocks[: self.num_blocks] if self.selected is None else blocks.index_select(0, self.selected)
            for blocks in (keys, values)
        )
        if self.only is not None:
            scores = query.new_empty(first, size)
            _products(query.index_select(0, self.queries), keys.transpose(2, 3), scores, scale)
            scores = scores.view(-1, heads, group, size)
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            weights = scores.add_(mask.index_select(0, self.queries)).softmax(dim=-1)
            return torch.matmul(weights, values).index_select(0, self.only)
        in_all = len(self.to_blocks)
        scores = query.new_empty(in_all, size)
        _products(query.index_select(0, self.queries), keys.transpose(2, 3), scores[:first], scale)
        if self.shared is not None and self.shared_queries is not None:
            several = query.reshape(-1, group, head_dim).index_select(0, self.shared_queries)
            several = several.view(len(self.shared), heads, -1, head_dim)
            _products(several, keys.index_select(0, self.shared).transpose(2, 3), scores[first:], scale)
        scores = scores.index_select(0, self.to_rows).view(rows, heads, group, -1)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        weights = scores.add_(mask).softmax(dim=-1).view(-1, size).index_select(0, self.to_blocks)
        sums = query.new_empty(in_all + 1, head_dim)
        sums[in_all:] = 0.0
        _products(weights[:first].view(-1, heads, group, size), values, sums[:first])
        if self.shared is not None:
            several = weights[first:].view(len(self.shared), heads, -1, size)
            _products(several, values.index_select(0, self.shared), sums[first:in_all])
        out = sums.index_select(0, self.to_sums).view(-1, rows * heads * group * head_dim)
        return (out[0] if len(out) == 1 else out.sum(dim=0)).view(rows, heads, group, head_dim)


def _products(one: Tensor, other: Tensor, out: Tensor, scale: float = 1.0) -> None:
    """Write scale · one [N, H, m, k] @ other [N, H, k, n] to `out` [N · H · m, n]."""
    count, heads, m, k = one.shape
    n = other.shape[-1]
    flat = one.reshape(count * heads, m, k), other.flatten(0, 1), out.view(count * heads, m, n)
    if scale == 1.0:
        torch.bmm(flat[0], flat[1], out=flat[2])
    else:
        flat[2].baddbmm_(flat[0], flat[1], beta=0.0, alpha=scale)


def _by_block(pairs: _Pairs) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], int]:
    """Return the blocks [S] to read, each pair's index in these and place there, and the number of places M. A block
    with more pairs than `_AT_ONCE` is read several times.
    """
    order = np.argsort(pairs.blocks, kind="stable")
    ordered = pairs.blocks[order]
    begins = np.append(True, ordered[1:] != ordered[:-1])
    starts = begins.nonzero()[0]
    rank = np.arange(len(ordered)) - np.repeat(starts, np.diff(np.append(starts, len(ordered))))
    most = min(int(rank.max()) + 1, _AT_ONCE)
    begins = rank % most == 0
    place, member = np.empty(len(ordered), dtype=np.int64), np.empty(len(ordered), dtype=np.int64)
    place[order], member[order] = np.cumsum(begins) - 1, rank % most
    return ordered[begins], place, member, most
