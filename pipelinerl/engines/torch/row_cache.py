"""`RowCache`: keys and values of every row, behind the two methods that transformers' models call.

A model calls `update` per layer and gets back the keys and values to attend to; `attention` then attends. A plan, set
before each forward, says how the forward uses the cache:

    PrefillPlan   prompts [P, T], padded on the right, which start after a position up to which their rows are filled;
                  each prompt's keys and values go to its rows; attention is causal
    DecodePlan    rows 0..B-1, one token each, at their own positions; attention sees a row's first position+1 entries;
                  of duplicate rows the model computes one, and the result is stored for all of them

Rows in use are the first ones, so a decode step attends to a view. Only if a few rows are much longer than the others
are those few gathered, so that the others do not read up to the longest length.

`RowBeginnings` records the tokens with which each row's cache begins. A prompt that begins like another one reuses its
cache: few-shot examples and system prompts, the questions of an evaluation, continued answers.

`AlikeRows` records which rows hold the same tokens, so that a decode step computes their next token once. The answers
of a group often begin alike, especially under a confident policy. Each row keeps its own cache, so nothing needs to be
done where answers diverge. Only the linear layers, most of a step on a CPU, see fewer tokens. The trainer does the same
to a micro-batch (`trainers.torch.packed.shared_beginnings`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl.engines.batching.model_runner import Prefill
from pipelinerl.engines.options import EngineOptions

#: Attended lengths are rounded up to a multiple of this, so that masks and kernels see few different shapes.
_LENGTH_STEP = 16
#: The shortest attended length: on a CPU, shorter products take a slower path.
_LEAST_LENGTH = 32
#: The cost of a gathered entry relative to reading one in place: it is read, written, and read again.
_GATHER_COST = 3
#: The fraction of reads that gathering must save to be worth its calls.
_GATHER_GAIN = 0.25
#: Beginnings are shared in multiples of this many tokens. Shorter ones cost as much to look up and copy as to compute,
#: and prompts can only be computed together if they continue from the same position.
STEP: Final = 32

_NOTHING: Final = np.zeros(0, dtype=np.int32)

#: The largest fraction of decoding rows left after deduplication at which its copies are worthwhile.
_MOST_LEFT: Final = 7 / 8
#: The number of distinguishable new beginnings, far more than begin between two steps.
_BEGINNINGS: Final = 2**20


@final
@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Plan that stores prompts `sources` i64 [R] in `rows`; `length` T includes padding.

    The tokens follow `start` earlier ones, which each prompt reads from its row in `own_rows` i64 [P].
    """

    rows: slice | Tensor
    sources: Tensor
    start: int
    length: int
    own_rows: Tensor


@final
@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One token for each of B rows, at `positions` i64 [B, 1]; no row attends beyond `length`.

    `entries` i64 [B · H] addresses the entries that this step writes, in a layer's cache viewed as [rows · H ·
    capacity, D]. Rows in `long_rows` i64 [R] attend to more than `common_length` entries; the others do not. The model
    is fed the K rows `first` i64 [K], and `of_row` i64 [B] maps each row to one of these; both None: all B are fed.
    """

    positions: Tensor
    entries: Tensor
    length: int
    common_length: int
    long_rows: Tensor | None
    first: Tensor | None = None
    of_row: Tensor | None = None
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    @property
    def gathers_fed(self) -> bool:
        """True if attention gathers the caches of the fed rows, rather than reading those of all rows."""
        few = self.first is not None and _GATHER_COST * len(self.first) <= len(self.positions)
        return few and self.long_rows is None

    @property
    def fed_positions(self) -> Tensor:
        """The positions i64 [K, 1] of the rows that the model is fed."""
        return self.positions if self.first is None else self.positions.index_select(0, self.first)

    def to_rows(self, fed: Tensor) -> Tensor:
        """Expand fed rows [K, …] to all rows [B, …]."""
        return fed if self.of_row is None else fed.index_select(0, self.of_row)

    def to_fed(self, rows: Tensor) -> Tensor:
        """Select the fed rows [K, …] of all rows [B, …]."""
        return rows if self.first is None else rows.index_select(0, self.first)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return an additive mask [B, 1, 1, length]: -inf after a row's position and before its window."""
        known = self._masks.get(window)
        if known is None:
            seen = torch.arange(self.length, device=self.positions.device)
            hidden = seen > self.positions
            if window is not None:
                hidden |= seen <= self.positions - window
            known = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            known = known.masked_fill_(hidden, -torch.inf)[:, None, None, :]
            self._masks[window] = known
        return known


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Sizes of a cache: `heads` are those of keys and values."""

    layers: int
    rows: int
    heads: int
    context: int
    head_dim: int

    @classmethod
    def of(cls, config: Any, options: EngineOptions) -> CacheShape:
        """Return the cache shape of a model with the text configuration `config`, with a row for each slot."""
        return cls(
            layers=config.num_hidden_layers,
            rows=options.slots,
            heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            context=options.context_length,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        )

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of keys and values together."""
        return 2 * self.layers * self.rows * self.heads * self.context * self.head_dim * dtype.itemsize


@final
class RowCache:
    """Keys and values [rows, heads, capacity, head_dim] of each layer.

    The capacity doubles up to the context as sequences grow, because compact entries are read faster than entries
    spread over rows of the full context.
    """

    #: Read by transformers; False because shapes change from step to step.
    is_compileable = False

    def __init__(self, shape: CacheShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._capacity = min(_LEAST_LENGTH, shape.context)
        sizes = (shape.rows, shape.heads, self._capacity, shape.head_dim)
        self._keys = [torch.zeros(sizes, dtype=dtype, device=device) for _ in range(shape.layers)]
        self._values = [torch.zeros(sizes, dtype=dtype, device=device) for _ in range(shape.layers)]
        self._row_heads = torch.arange(shape.rows * shape.heads, device=device).view(shape.rows, shape.heads)
        self.plan: PrefillPlan | DecodePlan

    def plan_prefill(self, rows: Sequence[Sequence[int]], start: int, length: int) -> PrefillPlan:
        """Plan a forward of `length` tokens of prompts from position `start` on; each is stored in its `rows`."""
        self._reserve(start + length)
        pairs = sorted((row, source) for source, of in enumerate(rows) for row in of)
        ordered = [row for row, _ in pairs]
        device = self._row_heads.device
        target: slice | Tensor = slice(ordered[0], ordered[-1] + 1)
        if ordered[-1] - ordered[0] + 1 != len(ordered):
            target = torch.tensor(ordered, device=device)
        self.plan = PrefillPlan(
            rows=target,
            sources=torch.tensor([source for _, source in pairs], device=device),
            start=start,
            length=length,
            own_rows=torch.tensor([of[0] for of in rows], device=device),
        )
        return self.plan

    def plan_decode(self, positions: NDArray[np.int64], alike: DuplicateRows | None = None) -> DecodePlan:
        """Plan a forward of rows 0..B-1 at `positions` [B], which computes each set of `alike` rows once."""
        device = self._row_heads.device
        rounded = (int(positions.max()) // _LENGTH_STEP + 1) * _LENGTH_STEP
        length = min(self._shape.context, max(_LEAST_LENGTH, rounded))
        self._reserve(length)
        common, long_rows = _split(positions, length)
        on_device = torch.from_numpy(positions).to(device)[:, None]
        self.plan = DecodePlan(
            positions=on_device,
            entries=(self._row_heads[: len(positions)] * self._capacity + on_device).view(-1),
            length=length,
            common_length=common,
            long_rows=None if long_rows is None else torch.from_numpy(long_rows).to(device),
            first=None if alike is None else torch.from_numpy(alike.first).to(device),
            of_row=None if alike is None else torch.from_numpy(alike.of_row).to(device),
        )
        return self.plan

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values [.., H, T, D] as planned; return those to attend to, of all rows."""
        keys, values, plan = self._keys[layer_idx], self._values[layer_idx], self.plan
        if isinstance(plan, PrefillPlan):
            end = plan.start + plan.length
            keys[plan.rows, :, plan.start : end] = key_states.index_select(0, plan.sources)
            values[plan.rows, :, plan.start : end] = value_states.index_select(0, plan.sources)
            if plan.start == 0:
                return key_states, value_states
            return keys[:, :, :end].index_select(0, plan.own_rows), values[:, :, :end].index_select(0, plan.own_rows)
        head_dim, batch = self._shape.head_dim, len(plan.positions)
        keys.view(-1, head_dim).index_copy_(0, plan.entries, plan.to_rows(key_states).reshape(-1, head_dim))
        values.view(-1, head_dim).index_copy_(0, plan.entries, plan.to_rows(value_states).reshape(-1, head_dim))
        return keys[:batch, :, : plan.length], values[:batch, :, : plan.length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0; transformers only uses it for default positions, and positions are always given here."""
        return 0

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Copy the first `length` entries of rows `sources` to rows `targets`, pairwise."""
        device = self._row_heads.device
        source, target = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for tensor in (*self._keys, *self._values):
            tensor[target, :, :length] = tensor[:, :, :length].index_select(0, source)

    def _reserve(self, length: int) -> None:
        if length <= self._capacity:
            return
        old, capacity = self._capacity, self._capacity
        while capacity < length:
            capacity *= 2
        self._capacity = min(capacity, self._shape.context)
        for tensors in (self._keys, self._values):
            for layer, tensor in enumerate(tensors):
                grown = tensor.new_zeros((*tensor.shape[:2], self._capacity, tensor.shape[3]))
                grown[:, :, :old] = tensor
                tensors[layer] = grown  # layer by layer: the old tensor is freed before the next grows


def _split(positions: NDArray[np.int64], length: int) -> tuple[int, NDArray[np.int64] | None]:
    """Return the length that most rows read and the rows to gather beyond it, or (length, None) for no split."""
    if length <= _LEAST_LENGTH:
        return length, None
    candidates = np.arange(_LEAST_LENGTH, length, _LENGTH_STEP)
    longer = len(positions) - np.searchsorted(np.sort(positions), candidates)
    cost = len(positions) * candidates + _GATHER_COST * longer * length
    best = int(cost.argmin())
    if cost[best] > (1 - _GATHER_GAIN) * len(positions) * length:
        return length, None
    return int(candidates[best]), np.flatnonzero(positions >= candidates[best])


class Continued(NamedTuple):
    """Prompts that continue after `start` tokens, copied from one row of `sources` each; `sources` is unused at 0."""

    start: int
    prefills: list[Prefill]
    sources: list[int]


@final
class RowBeginnings:
    """The tokens with which each row's cache begins.

    Only entries computed by the serving weights count, so `forget` must be called at a swap.
    """

    def __init__(self, rows: int) -> None:
        self._of: list[NDArray[np.int32]] = [_NOTHING] * rows

    def forget(self) -> None:
        """Forget all beginnings, because other weights serve."""
        self._of = [_NOTHING] * len(self._of)

    def note(self, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Record that the cache of `rows` now holds the keys and values of `tokens`."""
        beginning = np.asarray(tokens, dtype=np.int32)
        for row in rows:
            self._of[row] = beginning

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Record that the first `length` entries of rows `sources` were copied to rows `targets`, pairwise."""
        for target, beginning in zip(targets, [self._of[source][:length] for source in sources], strict=True):
            self._of[target] = beginning

    def next_of(self, waiting: list[Prefill]) -> Continued:
        """Remove from `waiting`, which is not empty, the prompts to compute next, all after the same number of tokens.

        Prompts with the longest cached beginnings go first, before that cache is overwritten. If several prompts share
        a beginning that is not yet cached, only one of them is returned, so that the others can reuse its cache.
        """
        tokens = [np.asarray(prefill.token_ids, dtype=np.int32) for prefill in waiting]
        found = [self._longest(each) for each in tokens]
        start = max(count for _, count in found)
        taken: list[int] = []
        for index, (_, count) in enumerate(found):
            if count == start and not any(_shared(tokens[other], tokens[index]) > start for other in taken):
                taken.append(index)
        chosen = Continued(start, [waiting[index] for index in taken], [found[index][0] for index in taken])
        waiting[:] = [prefill for index, prefill in enumerate(waiting) if index not in set(taken)]
        return chosen

    def _longest(self, tokens: NDArray[np.int32]) -> tuple[int, int]:
        """Return the row with the longest shared beginning and its length, in whole steps and without the last
        token.
        """
        most = (0, 0)
        seen: set[int] = set()
        for row, beginning in enumerate(self._of):
            if len(beginning) >= most[1] + STEP and id(beginning) not in seen:
                seen.add(id(beginning))
                most = max(most, (row, _shared(beginning, tokens)), key=lambda each: each[1])
        return most


def _shared(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """Return the number of tokens that both begin with, in whole steps, leaving at least one of `other`."""
    shorter = min(len(one), len(other) - 1)
    if shorter < STEP:
        return 0
    (differ,) = np.nonzero(one[:shorter] != other[:shorter])
    return (int(differ[0]) if len(differ) else shorter) // STEP * STEP


class DuplicateRows(NamedTuple):
    """Map of B rows to K distinct ones.

    Attributes:
        first: i64 [K], the first row of each set of equal rows.
        of_row: i64 [B], for each row the index of its set in `first`.
    """

    first: NDArray[np.int64]
    of_row: NDArray[np.int64]


@final
class AlikeRows:
    """Tracker of rows that hold the same tokens.

    Rows with the same tokens have the same lineage, a number: after a step, the first row with these tokens; before the
    first step, a number beyond all rows.
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
        """Record that rows 0..B-1 are fed `feeds` [B] at `positions` [B]; return the duplicates, or None if too few."""
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
