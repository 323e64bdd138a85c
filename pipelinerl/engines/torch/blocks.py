"""`BlockTable`: which blocks of the cache hold each row's keys and values, and which blocks later prompts may reuse.

A block holds the keys and values of a fixed number of tokens. A row's table lists its blocks in order; the last one is
the row's own, and full blocks may be shared by several rows. Full blocks are indexed by content: each entry is keyed by
the entry before it and by its own tokens, so a lookup compares tokens and never trusts a hash. Prompt tokens and
sampled tokens are indexed alike, so the next turn of an episode finds the whole conversation up to its last full block.

Only blocks computed wholly with the serving weights are indexed. `forget`, called at a swap, empties the index. A row
in flight keeps its blocks, but none of these is indexed again, because it follows keys and values of older weights. A
turn that begins after an update therefore recomputes its conversation, as a new prompt does.

An indexed block without a row is kept until its memory is needed. The least recently used one is evicted first, and of
one sequence the last block first. This module holds only numbers of blocks and rows; `PageCache` owns the tensors.

`AlikeRows` finds rows that hold the same tokens, so that a decode step computes their next token once. The answers of a
group often begin alike, especially under a confident policy. Only the linear layers, most of a step on a CPU, benefit.
The trainer does the same to a micro-batch (`trainers.torch.packed.shared_beginnings`).

Layers with a sliding window read a row's last blocks only. `WindowSlots` says where these layers keep a block, if they
still do: they have fewer slots than there are blocks. A slot without a row is kept for reuse until it is needed, and a
prompt reuses a prefix only as far as its last window is kept.

A state is that of one position, so it cannot be shared like a block. `PromptStates` keeps a copy of the states at the
end of each prompt while one of its rows runs: samples of the same prompt that join later start from this copy.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

#: Key of an index entry: the number of the entry before it (0 for none), and the block's tokens i32 as bytes.
_Key = tuple[int, bytes]

#: Blocks in use are renumbered from 0 once they spread over at least this multiple of their number.
_MOST_SPREAD: Final = 4 / 3
#: Blocks in use are not renumbered while all of them are among the first `_FEW`.
_FEW: Final = 32
#: Rows are deduplicated only if at most this fraction of them remains, because the copies cost time.
_MOST_LEFT: Final = 7 / 8
#: New rows get lineage numbers (see `AlikeRows`) modulo this; far fewer rows begin between two steps.
_BEGINNINGS: Final = 2**20


class Copies(NamedTuple):
    """Blocks `sources` are to be copied to blocks `targets`, pairwise; all are read before any is written."""

    sources: list[int]
    targets: list[int]


@dataclass(slots=True)
class _Row:
    """A row's blocks. `filed` lists the index entries of its leading full blocks; None if they must not be indexed."""

    blocks: list[int]
    filed: list[int] | None


class WindowSlots:
    """The slots in which layers with a sliding window of `window` tokens keep blocks of `size` tokens.

    `of_block` i64 [blocks] has the slot of each block, -1 if it has none, -2 if it is to be computed. A row of n blocks
    needs those from `first(n)` on, and those that its prefill reads.
    """

    def __init__(self, *, rows: int, blocks: int, size: int, window: int, slots: int) -> None:
        self.of_block: NDArray[np.int64] = np.full(blocks, -1)
        self.num_slots, self._size, self._window = slots, size, window
        self._uses: NDArray[np.int32] = np.zeros(blocks, dtype=np.int32)
        self._needed: list[list[int]] = [[] for _ in range(rows)]
        self._free, self._kept = list(range(slots)), OrderedDict[int, None]()
        self._most_in_use = 0

    @property
    def free(self) -> int:
        """The number of slots that no row needs."""
        return len(self._free) + len(self._kept)

    def first(self, num_blocks: int) -> int:
        """Return the first column that a row of `num_blocks` blocks needs, even if its next token is sampled again."""
        return max(0, (num_blocks - 1) * self._size - self._window) // self._size

    def reach(self, num_tokens: int) -> int:
        """Return the first column that a token attends to which follows `num_tokens` tokens."""
        return max(0, num_tokens - self._window + 1) // self._size

    def has(self, blocks: Sequence[int], num_tokens: int) -> bool:
        """Return whether a token that follows `num_tokens` tokens, in these blocks, finds its window."""
        return bool((self.of_block[blocks[self.reach(num_tokens) :]] >= 0).all())

    def reusable(self, blocks: Sequence[int]) -> int:
        """Return the length of the longest prefix of computed `blocks` whose last window is kept."""
        count = len(blocks)
        while count and not self.has(blocks[:count], count * self._size):
            count -= 1
        return count

    def lacking(self, reused: Sequence[int], num_blocks: int) -> int:
        """Return by how many slots too few are free for a row of `num_blocks` blocks that reuses its first ones."""
        first = self.first(num_blocks)
        needed = {*reused[self.reach(len(reused) * self._size) :], *reused[first:]}
        fresh = num_blocks - max(first, len(reused))
        return fresh + sum(map(self._kept.__contains__, needed)) - self.free

    def update(self, row: int, blocks: Sequence[int], reused: int = 0) -> None:
        """Keep what `row` needs of its `blocks`, whose first `reused` a prefill is to read; give back the rest."""
        first = self.first(len(blocks))
        reached = [*blocks[self.reach(reused * self._size) : min(reused, first)], *blocks[first:]]
        needed = [block for block in reached if self.of_block[block] != -1]
        for block in needed:
            if not self._uses[block]:
                self._kept.pop(block, None)
            self._uses[block] += 1
        for block in self._needed[row]:
            self._uses[block] -= 1
            if not self._uses[block]:
                self._kept[block] = None
        self._needed[row] = needed
        for block in needed:
            if self.of_block[block] == -2:
                if not self._free:
                    self.give_up(next(iter(self._kept)))
                self.of_block[block] = heapq.heappop(self._free)
        self.of_block[[block for block in blocks if self.of_block[block] == -2]] = -1
        used = self.num_slots - self.free
        self._most_in_use = max(self._most_in_use, used)
        while len(self._kept) > self._most_in_use:
            self.give_up(next(iter(self._kept)))

    def give_up(self, block: int) -> None:
        """Free the slot of a block that no row needs, if it has one."""
        if self._kept.pop(block, 0) is None:
            heapq.heappush(self._free, int(self.of_block[block]))
            self.of_block[block] = -1

    def move(self, source: int, target: int) -> None:
        """Exchange two rows."""
        self._needed[source], self._needed[target] = self._needed[target], self._needed[source]

    def renumber(self, new: NDArray[np.int64]) -> None:
        """Follow a renumbering of blocks: block i becomes new[i]."""
        for name in ("of_block", "_uses"):
            old: NDArray[Any] = getattr(self, name)
            there = old.copy()
            there[new] = old
            setattr(self, name, there)
        self._needed = [new[needed].tolist() if needed else [] for needed in self._needed]
        self._kept = OrderedDict((int(new[block]), None) for block in self._kept)


class BlockTable:
    """The blocks of `rows` rows of at most `context` tokens; at least one row of the whole context must fit.

    `keeps_few` is for a cache whose memory grows on demand: at most as many unused blocks are kept for later prompts as
    were ever in use at once. Layers with a sliding window of `window` tokens have `slots` blocks.
    """

    def __init__(
        self,
        *,
        rows: int,
        context: int,
        blocks: int,
        size: int,
        keeps_few: bool,
        window: int | None = None,
        slots: int = 0,
    ) -> None:
        self.size, self.num_blocks = size, blocks
        per_row = -(-context // size)
        self.windows = (
            None if window is None else WindowSlots(rows=rows, blocks=blocks, size=size, window=window, slots=slots)
        )
        """The slots of layers with a window of `window` tokens; None without such layers."""
        assert blocks >= per_row, "one row of the whole context must fit"
        self.table: NDArray[np.int64] = np.zeros((rows, per_row), dtype=np.int64)
        self.counts: NDArray[np.int64] = np.zeros(rows, dtype=np.int64)
        self.tokens: NDArray[np.int32] = np.zeros((rows, context), dtype=np.int32)
        self.changes = 0
        """Counter of changes of the table."""
        self.in_use = 0
        """The number of blocks that belong to rows."""
        self.reused_tokens = 0
        """Prompt tokens whose keys and values were found in indexed blocks, summed over all prompts."""
        self._keeps_few, self._most_in_use = keeps_few, 0
        self._rows = [_Row([], []) for _ in range(rows)]
        self._uses: NDArray[np.int32] = np.zeros(blocks, dtype=np.int32)
        self._free = list(range(blocks))
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._entries: dict[_Key, tuple[int, int]] = {}  # index entries by key: the number of the entry, and its block
        self._keys: dict[int, _Key] = {}  # the key of each indexed block
        self._number = 0

    @property
    def free(self) -> int:
        """The number of blocks that no row uses, including blocks kept for later prompts."""
        return len(self._free) + len(self._kept)

    # --- rows ----------------------------------------------------------------------------------------------------

    def find(self, tokens: NDArray[np.int32]) -> list[int]:
        """Return the indexed blocks that hold the longest prefix of `tokens` [T]."""
        return [self._entries[key][1] for key in self._found(tokens)]

    def begin(self, rows: Sequence[int], tokens: NDArray[np.int32], *, reuses: bool = True) -> int:
        """Give each of the empty rows `rows` blocks for the same prompt `tokens` [T].

        Return the number of tokens whose keys and values are already in reused blocks. The rows share all full blocks.
        These are indexed at once, so the caller must compute them before any row reads them.
        """
        keys = self._reusable(tokens) if reuses else []
        filed = [self._entries[key][0] for key in keys]
        blocks = [self._entries[key][1] for key in keys]
        for block in blocks:
            self._hold(block)
        full = len(tokens) // self.size
        shared = blocks + [self._take() for _ in range(full - len(blocks))]
        for row in rows:
            own = self._rows[row]
            own.filed = list(filed)
            self.tokens[row, : len(tokens)] = tokens
            for block in shared if row != rows[0] else ():
                self._hold(block)
            tail = [self._take()] if len(tokens) % self.size else []
            self._set(row, shared + tail, reused=len(keys))
            self._file(row, full)
        start = len(keys) * self.size
        self.reused_tokens += start
        return start

    def _reusable(self, tokens: NDArray[np.int32]) -> list[_Key]:
        """Return the keys of the indexed blocks that a prompt can reuse in all layers."""
        keys, windows = self._found(tokens), self.windows
        if windows is None or not keys:
            return keys
        blocks = [self._entries[key][1] for key in keys]
        count = windows.reusable(blocks)
        total = -(-len(tokens) // self.size)
        return keys[:count] if windows.lacking(blocks[:count], total) <= 0 else []

    def can_fork(self, source: int, num_tokens: int) -> bool:
        """Return whether all layers keep what rows need of the first `num_tokens` tokens of row `source`."""
        blocks = self._rows[source].blocks[: -(-num_tokens // self.size)]
        return self.windows is None or self.windows.has(blocks, num_tokens)

    def fork(self, source: int, rows: Sequence[int], num_tokens: int) -> Copies:
        """Let `rows` share the first blocks of row `source`; return the copies to make of a partly filled last one."""
        full, own = num_tokens // self.size, self._rows[source]
        tails: list[int] = []
        for row in rows:
            for block in own.blocks[:full]:
                self._hold(block)
            tail = [self._take()] if num_tokens % self.size else []
            tails += tail
            self.tokens[row, :num_tokens] = self.tokens[source, :num_tokens]
            self._rows[row].filed = None if own.filed is None else own.filed[:full]
            self._set(row, own.blocks[:full] + tail, reused=full)
        return Copies([own.blocks[full]] * len(tails) if tails else [], tails)

    def settle(self, rows: Sequence[int]) -> None:
        """Keep no more for `rows` than decoding needs: the prefill that read the prefixes of their prompts is over."""
        for row in rows if self.windows is not None else ():
            self._set(row, self._rows[row].blocks)

    def grow(self, positions: NDArray[np.int64], ahead: NDArray[np.int64] | int = 0) -> bool:
        """Give each of rows 0..B-1 a block for its next token, at `positions` [B], and for the `ahead` [B] tokens after
        it, at most a block's; return False if none is free.
        """
        for row in (positions + ahead >= self.counts[: len(positions)] * self.size).nonzero()[0].tolist():
            if not self.free or (self.windows is not None and not self.windows.free):
                return False
            own = self._rows[row]
            self._file(row, min(len(own.blocks), int(positions[row]) // self.size))
            self._set(row, [*own.blocks, self._take()])
        return True

    def release(self, row: int, num_tokens: int) -> None:
        """Free the blocks of a row whose first `num_tokens` tokens are computed; keep indexed ones for reuse."""
        own = self._rows[row]
        self._file(row, min(num_tokens // self.size, len(own.blocks)))
        blocks, own.filed = own.blocks, []
        self._set(row, [])
        for block in reversed(blocks):  # reversed, so that a sequence's later blocks are evicted first
            self._uses[block] -= 1
            if self._uses[block]:
                continue
            self._count(-1)
            if block in self._keys:
                self._kept[block] = None
            else:
                self._free_up(block)
        while self._keeps_few and len(self._kept) > self._most_in_use:
            self._free_up(self._evict())

    def move(self, source: int, target: int) -> None:
        """Move row `source` to the empty row `target`."""
        self._rows[target], self._rows[source] = self._rows[source], self._rows[target]
        if self.windows is not None:
            self.windows.move(source, target)
        self.tokens[target] = self.tokens[source]
        for row in (source, target):
            self._set(row, self._rows[row].blocks)

    def forget(self) -> None:
        """Empty the index, because other weights serve; rows keep their blocks, which are never indexed again."""
        self._entries.clear()
        self._keys.clear()
        for block in self._kept:
            self._free_up(block)
        self._kept.clear()
        for row in self._rows:
            row.filed = None if row.blocks else []

    def spoil(self, rows: Sequence[int]) -> list[int]:
        """Remove the blocks of `rows`, whose content is in doubt, from the index; return those that no other row uses.

        Blocks that other rows also use stay as they are: clearing them would change what these rows attend to.
        """
        uses = np.zeros_like(self._uses)
        for own in (self._rows[row] for row in rows):
            own.filed = None
            for block in own.blocks:
                uses[block] += 1
                key = self._keys.pop(block, None)
                if key is not None:
                    del self._entries[key]
        return ((uses > 0) & (uses == self._uses)).nonzero()[0].tolist()

    # --- order ---------------------------------------------------------------------------------------------------

    def gather(self) -> Copies | None:
        """Renumber the blocks in use from 0 if they spread too far to read them all; return the copies to make."""
        used = self._uses > 0
        last, count = int(used.nonzero()[0][-1]) + 1 if self.in_use else 0, self.in_use
        if last < max(_FEW, _MOST_SPREAD * count):
            return None
        # The first `limit` blocks are for those in use and a few more: move blocks that no row uses out of there.
        limit = min(count + max(_FEW // 4, count // 4), self.num_blocks)
        kept = np.zeros(self.num_blocks, dtype=bool)
        kept[list(self._kept)] = True
        in_the_way = kept[:limit].nonzero()[0]
        beyond = (~used & ~kept)[limit:].nonzero()[0][: len(in_the_way)] + limit
        for block in in_the_way[len(beyond) :].tolist():
            del self._kept[block]
            del self._entries[self._keys.pop(block)]
            if self.windows is not None:
                self.windows.give_up(block)
        in_the_way = in_the_way[: len(beyond)]
        high = used[count:].nonzero()[0] + count
        low = (~used[:count]).nonzero()[0]
        sources, targets = np.concatenate((high, in_the_way)), np.concatenate((low, beyond))
        self._renumber(sources, targets)
        return Copies(sources.tolist(), targets.tolist())

    def _renumber(self, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
        new = np.arange(self.num_blocks)
        new[sources] = targets
        if self.windows is not None:
            # The targets are free, so their blocks, which have no slot, take the places of the sources.
            complete = new.copy()
            complete[np.setdiff1d(targets, sources)] = np.setdiff1d(sources, targets)
            self.windows.renumber(complete)
        uses = np.zeros_like(self._uses)
        held = self._uses.nonzero()[0]
        uses[new[held]] = self._uses[held]
        self._uses = uses
        self._kept = OrderedDict((int(new[block]), None) for block in self._kept)
        self._keys = {int(new[block]): key for block, key in self._keys.items()}
        self._entries = {key: (self._entries[key][0], block) for block, key in self._keys.items()}
        for row, own in enumerate(self._rows):
            self._set(row, new[own.blocks].tolist() if own.blocks else own.blocks)
        taken = self._uses > 0
        taken[list(self._kept)] = True
        self._free = (~taken).nonzero()[0].tolist()  # sorted ascending, and therefore a valid heap

    # --- blocks --------------------------------------------------------------------------------------------------

    def _set(self, row: int, blocks: list[int], *, reused: int = 0) -> None:
        self._rows[row].blocks = blocks
        if self.windows is not None:
            self.windows.update(row, blocks, reused)
        self.table[row, : len(blocks)] = blocks
        self.counts[row] = len(blocks)
        self.changes += 1

    def _found(self, tokens: NDArray[np.int32]) -> list[_Key]:
        keys: list[_Key] = []
        before = 0
        for start in range(0, len(tokens) // self.size * self.size, self.size):
            key = (before, tokens[start : start + self.size].tobytes())
            if key not in self._entries:
                break
            keys.append(key)
            before = self._entries[key][0]
        return keys

    def _file(self, row: int, full: int) -> None:
        own = self._rows[row]
        if own.filed is None:
            return
        for index in range(len(own.filed), full):
            block = own.blocks[index]
            tokens = self.tokens[row, index * self.size : (index + 1) * self.size]
            key = (own.filed[-1] if own.filed else 0, tokens.tobytes())
            if key not in self._entries:
                self._number += 1
                self._entries[key] = (self._number, block)
                self._keys[block] = key
            own.filed.append(self._entries[key][0])

    def _take(self) -> int:
        block = heapq.heappop(self._free) if self._free else self._evict()
        self._uses[block] = 1
        self._count(1)
        if self.windows is not None:
            self.windows.of_block[block] = -2
        return block

    def _hold(self, block: int) -> None:
        if not self._uses[block]:
            del self._kept[block]
            self._count(1)
        self._uses[block] += 1

    def _evict(self) -> int:
        block, _ = self._kept.popitem(last=False)
        del self._entries[self._keys.pop(block)]
        if self.windows is not None:
            self.windows.give_up(block)
        return block

    def _free_up(self, block: int) -> None:
        if self.windows is not None:
            self.windows.give_up(block)
        heapq.heappush(self._free, block)

    def _count(self, change: int) -> None:
        self.in_use += change
        self._most_in_use = max(self._most_in_use, self.in_use)


def tokens_of(token_ids: Sequence[Any]) -> NDArray[np.int32]:
    """Return token ids as an i32 array, the type of `BlockTable.tokens`."""
    return np.asarray(token_ids, dtype=np.int32)


class DuplicateRows(NamedTuple):
    """Map of B rows to the K distinct ones, `first` i64 [K]; `of_row` i64 [B] is each row's index in `first`."""

    first: NDArray[np.int64]
    of_row: NDArray[np.int64]


class AlikeRows:
    """Tracker of rows that hold the same tokens.

    Each row has a lineage, a number that rows with equal tokens share. After a step, it is the index of the first row
    with these tokens. Before a row's first step, it is a number above all row indices.
    """

    def __init__(self, rows: int) -> None:
        self._lineage: NDArray[np.int64] = np.arange(rows)
        self._begun = 0

    def begin(self, rows: Sequence[int]) -> None:
        """Mark these rows as equal to one another, and different from all others."""
        self._lineage[list(rows)] = len(self._lineage) + self._begun
        self._begun = (self._begun + 1) % _BEGINNINGS

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move rows `sources` to rows `targets`, pairwise."""
        self._lineage[list(targets)] = self._lineage[list(sources)]

    def step(self, feeds: NDArray[Any], positions: NDArray[Any]) -> DuplicateRows | None:
        """Record that rows 0..B-1 are fed `feeds` at `positions` [B]; return duplicates, None if they are too few."""
        count = len(feeds)
        order = np.lexsort((positions, feeds, self._lineage[:count]))
        columns = np.stack((self._lineage[:count], feeds, positions))[:, order]
        differs = np.append(True, (columns[:, 1:] != columns[:, :-1]).any(axis=0))
        classes = np.empty(count, dtype=np.int64)
        classes[order] = np.cumsum(differs) - 1
        first = np.full(int(differs.sum()), count, dtype=np.int64)
        np.minimum.at(first, classes, np.arange(count))
        self._lineage[:count] = first[classes]
        return DuplicateRows(first, classes) if len(first) <= _MOST_LEFT * count else None


class PromptStates:
    """The slots from R on, for R rows, with the states at the end of each prompt that has a running row."""

    def __init__(self, table: BlockTable) -> None:
        rows = len(table.counts)
        self._table = table
        self._slots = np.arange(rows, 2 * rows)
        self._of_row: NDArray[np.int64] = np.full(rows, -1)
        self._lengths: NDArray[np.int64] = np.zeros(2 * rows, dtype=np.int64)

    def begin(self, rows: Sequence[int], length: int) -> int:
        """Return a slot for the states of a prompt of `length` tokens, from which `rows` sample."""
        slot = int(np.setdiff1d(self._slots, self._of_row)[0])
        self._of_row[list(rows)], self._lengths[slot] = slot, length
        return slot

    def join(self, source: int, rows: Sequence[int]) -> int:
        """Let `rows` sample from the prompt of row `source`; return its slot."""
        self._of_row[list(rows)] = self._of_row[source]
        return int(self._of_row[source])

    def find(self, tokens: NDArray[np.int32]) -> int | None:
        """Return a row whose prompt is `tokens` [T], if there is one."""
        count = len(tokens)
        for row in ((self._of_row >= 0) & (self._lengths[self._of_row] == count)).nonzero()[0].tolist():
            if np.array_equal(self._table.tokens[row, :count], tokens):
                return int(row)
        return None

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move rows `sources` to rows `targets`, pairwise."""
        self._of_row[list(targets)] = self._of_row[list(sources)]
        self.forget(sources)

    def forget(self, rows: Sequence[int] | None = None) -> None:
        """Detach `rows`, or all, from their prompts' states."""
        self._of_row[slice(None) if rows is None else list(rows)] = -1
