"""`RowCache`: keys and values of every row, behind the two methods that transformers' models call.

A model calls `update` per layer and gets back what to attend to; `torch_attention` then attends. What a forward does
with the cache is said beforehand by a plan:

    PrefillPlan   prompts [P, T], padded on the right; each one's keys and values go to its rows; attention is causal
    DecodePlan    rows 0..B-1, one token each, at their own positions; attention sees a row's first position+1 entries

Rows in use are the first ones, so what a decode step attends to is a view. Only when a few rows are much longer than
the others are those few gathered, so that the many do not read as far as the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl.engines.options import EngineOptions

#: Attended lengths are rounded up to a multiple of it, so that masks and kernels see few different shapes.
_LENGTH_STEP = 16
#: No shorter length is attended to: on a CPU the products of a shorter one take another, slower way.
_LEAST_LENGTH = 32
#: Reading a gathered entry costs about as much as reading this many in place: it is read, written, and read again.
_GATHER_COST = 3
#: Gathering must save this part of what is read, or it is not worth its calls.
_GATHER_GAIN = 0.25


@final
@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """`rows` take the keys and values of prompts `sources` i64 [R]; `length` T is the padded one."""

    rows: slice | Tensor
    sources: Tensor
    length: int


@final
@dataclass(frozen=True, slots=True)
class DecodePlan:
    """One token for each of B rows, at `positions` i64 [B, 1]; `length` bounds what any of them sees.

    `entries` i64 [B · H] addresses what this step writes, in a layer's cache seen as [rows · H · capacity, D]. Rows in
    `long_rows` i64 [R] see more than `common_length` entries; the others do not.
    """

    positions: Tensor
    entries: Tensor
    length: int
    common_length: int
    long_rows: Tensor | None
    _masks: dict[int | None, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [B, 1, 1, length]: -inf on what comes after a row's position or before its window."""
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
        """The cache of a model with the text configuration `config`, for as many sequences as may run at once."""
        return cls(
            layers=config.num_hidden_layers,
            rows=options.slots,
            heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            context=options.context_length,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        )

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values together."""
        return 2 * self.layers * self.rows * self.heads * self.context * self.head_dim * dtype.itemsize


@final
class RowCache:
    """Keys and values [rows, heads, capacity, head_dim] of each layer.

    The capacity doubles up to the context as sequences grow: entries that lie close together are read faster than the
    same ones spread over a long context's rows.
    """

    #: transformers asks; shapes here change from step to step.
    is_compileable = False

    def __init__(self, shape: CacheShape, *, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._capacity = min(_LEAST_LENGTH, shape.context)
        sizes = (shape.rows, shape.heads, self._capacity, shape.head_dim)
        self._keys = [torch.zeros(sizes, dtype=dtype, device=device) for _ in range(shape.layers)]
        self._values = [torch.zeros(sizes, dtype=dtype, device=device) for _ in range(shape.layers)]
        self._row_heads = torch.arange(shape.rows * shape.heads, device=device).view(shape.rows, shape.heads)
        self.plan: PrefillPlan | DecodePlan

    def plan_prefill(self, rows: list[int], sources: list[int], length: int) -> PrefillPlan:
        """The next forward runs prompts of `length` tokens; each of `rows` keeps the prompt in `sources`, pairwise."""
        self._reserve(length)
        pairs = sorted(zip(rows, sources, strict=True))
        ordered = [row for row, _ in pairs]
        device = self._row_heads.device
        target: slice | Tensor = slice(ordered[0], ordered[-1] + 1)
        if ordered[-1] - ordered[0] + 1 != len(ordered):
            target = torch.tensor(ordered, device=device)
        self.plan = PrefillPlan(target, torch.tensor([source for _, source in pairs], device=device), length)
        return self.plan

    def plan_decode(self, positions: NDArray[np.int64]) -> DecodePlan:
        """The next forward feeds rows 0..B-1 at `positions` [B]."""
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
        )
        return self.plan

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store a layer's new keys and values [.., H, T, D] as planned; returns those to attend to."""
        keys, values, plan = self._keys[layer_idx], self._values[layer_idx], self.plan
        if isinstance(plan, PrefillPlan):
            keys[plan.rows, :, : plan.length] = key_states.index_select(0, plan.sources)
            values[plan.rows, :, : plan.length] = value_states.index_select(0, plan.sources)
            return key_states, value_states
        head_dim = self._shape.head_dim
        keys.view(-1, head_dim).index_copy_(0, plan.entries, key_states.reshape(-1, head_dim))
        values.view(-1, head_dim).index_copy_(0, plan.entries, value_states.reshape(-1, head_dim))
        batch = key_states.shape[0]
        return keys[:batch, :, : plan.length], values[:batch, :, : plan.length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """transformers asks for a default position; positions are always given here."""
        return 0

    def copy(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """Rows `targets` become the first `length` entries of rows `sources`, pairwise."""
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
                tensors[layer] = grown  # one layer at a time: the old one is freed before the next is grown


def _split(positions: NDArray[np.int64], length: int) -> tuple[int, NDArray[np.int64] | None]:
    """The length that most rows should read, and the rows to gather since they need more; (length, None): no split."""
    if length <= _LEAST_LENGTH:
        return length, None
    candidates = np.arange(_LEAST_LENGTH, length, _LENGTH_STEP)
    longer = len(positions) - np.searchsorted(np.sort(positions), candidates)
    cost = len(positions) * candidates + _GATHER_COST * longer * length
    best = int(cost.argmin())
    if cost[best] > (1 - _GATHER_GAIN) * len(positions) * length:
        return length, None
    return int(candidates[best]), np.flatnonzero(positions >= candidates[best])
