"""`PageCache`: a cache of keys and values in blocks, with the methods that transformers' models call.

A model calls `update` per attention layer and gets back the keys and values to attend to; `attention` then attends.
Each layer has its own number of heads and its own widths; latent attention (MLA) stores its latents. Recurrent layers
(state spaces, short convolutions, linear attention) keep states instead, one for each row. A plan, set before each
forward, says how the forward uses the cache:

    PrefillPlan   prompts [P, T], padded on the right, which follow the same number of cached tokens; their keys and
                  values go to the blocks of their rows; attention is causal. Padding would change states, so prompts
                  of a model with states have equal lengths and follow no cached tokens
    DecodePlan    rows 0..B-1, one token each, at their own positions; attention sees a row's first position+1 entries;
                  of duplicate rows the model computes one, and the result is stored for all of them

`BlockTable` says which blocks belong to which row. Layers with a sliding window keep a row's last blocks only, in slots
that `WindowSlots` numbers: `windowed` of a plan is the same forward over these slots. How a decode step reads blocks
depends on device and dtype:

    KERNEL     `paged_attention` reads the blocks by their table: CUDA
    IN_PLACE   blocks are read in place, each with the queries of its rows, and only scores are put in the order of
               the rows: fp32 on a CPU, where a copy of the keys would cost more than the products
    GATHERED   keys and values are first copied into the order of the rows: everything else
    TILES      as GATHERED, with attention whose bits do not depend on the batch (`numerics.torch_batch_invariant`)
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from pipelinerl.engines.memory_budget import BLOCK
from pipelinerl.engines.torch.blocks import BlockTable, Copies, DuplicateRows, WindowSlots

#: Name of a state: its kind, "conv" or "recurrent", its layer, and its number within the layer.
StateName = tuple[str, int, int]


class CacheReading(StrEnum):
    """Ways in which a decode step reads the blocks."""

    KERNEL = "kernel"
    IN_PLACE = "in_place"
    GATHERED = "gathered"
    TILES = "tiles"


@dataclass(frozen=True, slots=True)
class Chunk:
    """The layer's tokens attend within chunks of `size` tokens only, as in Llama 4; the counterpart of a window."""

    size: int


def hidden_keys(keys: Tensor, own: Tensor, window: int | Chunk | None) -> Tensor:
    """Return which of the positions `keys` a query at position `own` does not attend to; the two broadcast."""
    hidden = keys > own
    if window is None:
        return hidden
    first = own // window.size * window.size if isinstance(window, Chunk) else own - window + 1
    return hidden | (keys < first)


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """Plan of a prefill of P prompts, padded to T tokens each; it stores N tokens' keys and values.

    Attributes:
        sources: i64 [N], the tokens to store, as indices of the padded tokens [P · T].
        entries: where to store them: by number of heads H, i64 [N · H], indices of a tensor viewed as
            [blocks · H · size, D].
        start: the number of tokens that precede each prompt and are already cached.
        before: i64 [P, start / size], the blocks of these cached tokens.
        prompts: i64 [R], the prompts whose final states are stored, each in the slot i64 [R] of `slots`.
        windowed: the plan of layers with a sliding window, if they keep less; its `before` are a prefix's last blocks.
    """

    sources: Tensor
    entries: Mapping[int, Tensor]
    start: int
    before: Tensor
    reading: CacheReading
    prompts: Tensor | None = None
    slots: Tensor | None = None
    windowed: PrefillPlan | None = None


@dataclass(frozen=True)
class DecodePlan:
    """Plan of a step that feeds one token to each of B rows. The model computes K of them; the others are duplicates.

    Attributes:
        positions: i64 [K, 1], the positions of the K computed rows' tokens.
        entries: the entries that this step writes, as in `PrefillPlan`, for B tokens; empty if a kernel finds them.
        table: i64 [K, L / size], the blocks of the computed rows, padded with a row's first block.
        length: L, a multiple of the blocks' size; no row attends beyond it.
        layout: the part that stays the same while rows keep their blocks; None if a kernel reads the table.
        of_row: i64 [B], the index of each row among the computed rows; None if all B are computed.
        windowed: the plan of layers with a sliding window, if they keep less; its positions count from the first block
            of its table.
    """

    positions: Tensor
    entries: Mapping[int, Tensor]
    table: Tensor
    length: int
    reading: CacheReading
    layout: DecodeLayout | None = None
    of_row: Tensor | None = None
    windowed: DecodePlan | None = None
    _masks: dict[int | Chunk | None, Tensor] = field(default_factory=dict)

    def to_rows(self, fed: Tensor) -> Tensor:
        """Expand results of the K computed rows [K, …] to all rows [B, …]."""
        return fed if self.of_row is None else fed.index_select(0, self.of_row)

    def mask(self, window: int | Chunk | None, dtype: torch.dtype) -> Tensor:
        """Return an additive mask [K, 1, 1, length]: -inf after a row's position and before its window."""
        known = self._masks.get(window)
        if known is None:
            hidden = hidden_keys(torch.arange(self.length, device=self.positions.device), self.positions, window)
            known = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
            known = known.masked_fill_(hidden, -torch.inf)[:, None, None, :]
            self._masks[window] = known
        return known


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """Sizes of a model's cache, learned from transformers' own cache after a forward of one row.

    Attributes:
        pages: for each attention layer that stores keys and values, their heads and width: (keys, values).
        states: by name, the shape of one row's state, and its dtype.
        dtype: dtype of keys and values.
        latent: True if models compute keys and values from what the cache returns (multi-head latent attention).
        size: number of tokens in a block.
        window: the longest sliding window, in tokens, of the layers `windowed`.
    """

    pages: Mapping[int, tuple[tuple[int, int], tuple[int, int]]]
    states: Mapping[StateName, tuple[tuple[int, ...], torch.dtype]]
    dtype: torch.dtype
    latent: bool
    size: int
    window: int | None = None
    windowed: frozenset[int] = frozenset()

    @classmethod
    def of(cls, filled: Any, *, dtype: torch.dtype, latent: bool, windows: Mapping[int, int]) -> CacheShape:
        """Return the shape of `filled`, transformers' cache of one row; `dtype` is for no keys, `windows` by layer."""
        pages, states = {}, {}
        for index, layer in enumerate(filled.layers):
            if getattr(layer, "keys", None) is not None:
                keys, values = layer.keys, layer.values
                pages[index] = (keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3])
                dtype = keys.dtype
            for kind in ("conv", "recurrent"):
                for number, state in (getattr(layer, f"{kind}_states", None) or {}).items():
                    if state is not None:
                        states[kind, index, number] = tuple(state.shape[1:]), state.dtype
        return cls(
            pages=pages,
            states=states,
            dtype=dtype,
            latent=latent,
            size=BLOCK,
            window=max(windows.values(), default=None),
            windowed=frozenset(windows),
        )

    @property
    def heads(self) -> set[int]:
        """The numbers of heads that keys and values of the layers have."""
        return {heads for pair in self.pages.values() for heads, _ in pair}

    @property
    def block_bytes(self) -> int:
        """The bytes of a block: keys and values of all layers that keep whole sequences."""
        return self._bytes_of(self.pages.keys() - self.windowed)

    @property
    def slot_bytes(self) -> int:
        """The bytes of a block in the layers with a sliding window."""
        return self._bytes_of(self.windowed)

    def _bytes_of(self, layers: Collection[int]) -> int:
        numbers = sum(heads * width for layer in layers for heads, width in self.pages[layer])
        return numbers * self.size * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """The bytes of one row's states."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.states.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeLayout:
    """The part of `DecodePlan` that does not depend on positions.

    It stays valid while the block table and the duplicate rows do not change. `blocks` are the blocks that the table
    numbers, if the cache returns only these. In `windowed`, the layout of layers with a sliding window, the table
    begins with each row's block `start`. Attention keeps in `sections` how it reads them in place, by heads and
    queries for each head.
    """

    changes: int
    key: tuple[bytes, bytes]
    table: Tensor
    of_row: Tensor | None
    own: NDArray[np.int64]
    counts: NDArray[np.int64]
    blocks: Tensor | None
    start: NDArray[np.int64] | int = 0
    windowed: DecodeLayout | None = None
    sections: dict[tuple[int, int], Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LayerStates:
    """One layer's states in a `PageCache`; the names are those of transformers before 5.21."""

    cache: PageCache
    layer: int
    record_past = False

    @property
    def conv_states(self) -> Sequence[Tensor | None]:
        return [self.cache.get_conv_state(self.layer, each) for each in self._numbers("conv")]

    @property
    def recurrent_states(self) -> Sequence[Tensor | None]:
        return [self.cache.get_recurrent_state(self.layer, each) for each in self._numbers("recurrent")]

    def _numbers(self, kind: str) -> list[int]:
        return sorted(number for each, layer, number in self.cache._states if (each, layer) == (kind, self.layer))


class PageCache:
    """Keys and values [blocks, heads, size, width] of each attention layer, and states [slots, …] of recurrent layers.

    On a CPU the number of blocks in memory doubles on demand. On a GPU all are allocated at once, and one more,
    `spare`, into which rows without a sequence write. With R rows, state slots 0..R-1 belong to the rows, and the
    others are for `PromptStates`. States never move in memory, so CUDA graphs may hold their addresses.
    """

    #: Read by transformers. False, because shapes change from step to step.
    is_compileable = False

    def __init__(self, shape: CacheShape, table: BlockTable, *, device: torch.device, reading: CacheReading) -> None:
        self.table = table
        self.reading = reading
        self._shape, self._device = shape, device
        self.spare = table.num_blocks
        self._most = {False: table.num_blocks, True: 0 if table.windows is None else table.windows.num_slots}
        # The blocks in memory, by whether layers have a sliding window.
        self._present = {
            windowed: most + 1 if device.type == "cuda" else min(64, most) for windowed, most in self._most.items()
        }
        self._layers = {
            layer: [
                torch.zeros(
                    (self._present[self._slides(layer)], heads, shape.size, width), dtype=shape.dtype, device=device
                )
                for heads, width in pair
            ]
            for layer, pair in shape.pages.items()
        }
        rows = len(table.counts)
        self._states = {
            name: torch.zeros((2 * rows, *size), dtype=dtype, device=device)
            for name, (size, dtype) in shape.states.items()
        }
        self._rows, self._heads = np.arange(rows), shape.heads
        self._layout: DecodeLayout | None = None
        self.plan: PrefillPlan | DecodePlan

    def plan_prefill(
        self, rows: Sequence[Sequence[int]], lengths: Sequence[int], start: int, longest: int, kept: Sequence[int] = ()
    ) -> PrefillPlan:
        """Plan a forward of tokens [start, lengths[i]) of each prompt i, padded to `longest` tokens.

        The results are stored in the blocks of `rows[i]`, the rows that sample from prompt i. Its final states go to
        the slots of these rows and to slot `kept[i]`.
        """
        size, table = self._shape.size, self.table
        sources, blocks, offsets = [], [], []
        for prompt, (own, length) in enumerate(zip(rows, lengths, strict=True)):
            places = np.arange(start, length)
            for row in own:
                # Full blocks are shared, so rows after the first store only their last block.
                mine = places if row == own[0] else places[places >= length // size * size]
                sources.append(prompt * longest + mine - start)
                blocks.append(table.table[row, mine // size])
                offsets.append(mine % size)
        firsts = [own[0] for own in rows]
        self._reserve(int(table.table[[row for own in rows for row in own]].max()) + 1)
        all_sources, all_blocks, all_offsets = map(np.concatenate, (sources, blocks, offsets))
        before, windowed = table.table[firsts, : start // size], None
        if (windows := table.windows) is not None:
            self._reserve_slots(windows)
            slots = windows.of_block[all_blocks]
            stored = slots >= 0
            windowed = PrefillPlan(
                sources=self._to(all_sources[stored]),
                entries=self._entries(slots[stored], all_offsets[stored]),
                start=start,
                before=self._to(windows.of_block[before[:, windows.reach(start) :]]),
                reading=self.reading,
            )
        self.plan = PrefillPlan(
            sources=self._to(all_sources),
            entries=self._entries(all_blocks, all_offsets),
            start=start,
            before=self._to(before),
            reading=self.reading,
            windowed=windowed,
            prompts=self._to(np.repeat(np.arange(len(rows)), [len(own) + 1 for own in rows])) if kept else None,
            slots=self._to(np.concatenate([[*own, slot] for own, slot in zip(rows, kept, strict=True)]))
            if kept
            else None,
        )
        return self.plan

    def plan_decode(
        self, positions: NDArray[np.int64], alike: DuplicateRows | None = None, rows: NDArray[np.int64] | None = None
    ) -> DecodePlan:
        """Plan a forward of one token in each of rows 0..B-1 at `positions` [B]; duplicate rows are computed once.

        With `rows` [B], ascending, token i is fed to row rows[i]: a row may be fed several tokens at once.
        """
        size, table = self._shape.size, self.table
        rows = self._rows[: len(positions)] if rows is None else rows
        layout = self._layout_of(rows, alike)
        entries = self._entries(table.table[rows, positions // size], positions % size)
        fed = positions if alike is None else positions[alike.first]
        windowed = None
        if (windows := table.windows) is not None and (inner := layout.windowed) is not None:
            slots = windows.of_block[table.table[rows, positions // size]]
            windowed = DecodePlan(
                positions=self._to(fed - inner.start * size)[:, None],
                entries=self._entries(slots, positions % size),
                table=inner.table,
                length=inner.table.shape[1] * size,
                reading=self.reading,
                layout=inner,
                of_row=layout.of_row,
            )
        self.plan = DecodePlan(
            positions=self._to(fed)[:, None],
            entries=entries,
            table=layout.table,
            length=layout.table.shape[1] * size,
            reading=self.reading,
            layout=layout,
            of_row=layout.of_row,
            windowed=windowed,
        )
        return self.plan

    def plan_on_device(self, positions: Tensor, table: Tensor) -> DecodePlan:
        """Plan a forward from tensors that a CUDA graph reads: `positions` i64 [K, 1], blocks `table` i64 [K, n]."""
        length = table.shape[1] * self._shape.size
        self.plan = DecodePlan(positions=positions, entries={}, table=table, length=length, reading=CacheReading.KERNEL)
        return self.plan

    def _layout_of(self, rows: NDArray[np.int64], alike: DuplicateRows | None) -> DecodeLayout:
        """Return the tensors that stay the same while `rows` keep their blocks and their duplicates."""
        table, known = self.table, self._layout
        key = (rows.tobytes(), b"" if alike is None else alike.of_row.tobytes())
        if known is not None and known.changes == table.changes and known.key == key:
            return known
        if self.reading is CacheReading.IN_PLACE and (copies := table.gather()) is not None:
            self.copy(copies, renumbered=True)
        counts = table.counts[rows]
        width = int(counts.max())
        own = table.table[rows, :width]
        own = np.where(np.arange(width) < counts[:, None], own, own[:, :1])
        self._reserve(int(own.max()) + 1)  # of all rows: the step also writes to the blocks of duplicate rows
        if alike is not None:
            own, counts = own[alike.first], counts[alike.first]
        windowed = None
        if table.windows is not None:
            windowed = self._windowed_layout(own, counts, table.windows, key, None if alike is None else alike.of_row)
        blocks = None
        if self._shape.latent:  # a model expands all latents that it gets, so give it only those of blocks in use
            used, numbers = np.unique(own, return_inverse=True)
            blocks, own = self._to(used), numbers.reshape(own.shape)
        self._layout = DecodeLayout(
            changes=table.changes,
            key=key,
            table=self._to(own),
            of_row=None if alike is None else self._to(alike.of_row),
            own=own,
            counts=counts,
            blocks=blocks,
            windowed=windowed,
        )
        return self._layout

    def _windowed_layout(
        self,
        table: NDArray[np.int64],
        counts: NDArray[np.int64],
        windows: WindowSlots,
        key: tuple[bytes, bytes],
        of_row: NDArray[np.int64] | None,
    ) -> DecodeLayout:
        """Return the layout of the blocks that windows reach, of rows with `counts` [K] blocks in `table` [K, n]."""
        self._reserve_slots(windows)
        first = np.asarray([windows.first(count) for count in counts.tolist()])
        columns = np.arange(table.shape[1])
        # A row may have begun without the first of these blocks, which no token that it feeds attends to.
        lost = ((windows.of_block[table] < 0) & (columns >= first[:, None]) & (columns < counts[:, None])).sum(axis=1)
        start = first + lost
        kept = counts - start
        places = np.arange(int(kept.max()))
        columns = start[:, None] + np.where(places < kept[:, None], places, 0)
        slots = windows.of_block[np.take_along_axis(table, columns, axis=1)]
        return DecodeLayout(
            changes=self.table.changes,
            key=key,
            table=self._to(slots),
            of_row=None if of_row is None else self._to(of_row),
            own=slots,
            counts=kept,
            blocks=None,
            start=start,
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Store keys and values [.., H, T, D]; return prompts' [P, H, start + T, D], or blocks [N, H, size, D]."""
        plan, (keys, values) = self.plan, self._layers[layer_idx]
        if plan.windowed is not None and self._slides(layer_idx):
            plan = plan.windowed
        if not isinstance(plan, DecodePlan):
            return _filled(keys, key_states, plan), _filled(values, value_states, plan)
        _put(keys, plan.to_rows(key_states), plan.entries)
        _put(values, plan.to_rows(value_states), plan.entries)
        if plan.layout is None or (used := plan.layout.blocks) is None:
            return keys, values
        return keys.index_select(0, used), values.index_select(0, used)

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values [N, H, size, D]; valid until the cache grows."""
        keys, values = self._layers[layer]
        return keys, values

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Return the number of tokens before the first one, for Llama 4, which scales queries by their positions.

        In a decode step these differ by row, so return -1, which leaves queries as they are: `attention` scales them.
        Without a layer, return 0: transformers uses it only for default positions, which this engine never needs.
        """
        if layer_idx is None:
            return 0
        return -1 if isinstance(self.plan, DecodePlan) else self.plan.start

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0; transformers uses it only for masks, which come from the plan."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the length and the offset of a mask; the real ones come from the plan."""
        return query_length, 0

    # --- states --------------------------------------------------------------------------------------------------

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the rows' last inputs [B, C, K] of a convolution, which the layer may update; None in a prefill."""
        return self._state(("conv", layer_idx, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the rows' recurrent states [B, …], which the layer may update in place; None in a prefill."""
        return self._state(("recurrent", layer_idx, state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Store the last inputs of a convolution; return new inputs [.., C, T] after those that a step saw before."""
        name = "conv", layer_idx, state_idx
        size, before = conv_kernel_size or conv_states.shape[-1], self._state(name)
        inputs = conv_states if before is None else torch.cat((before, conv_states), dim=-1)
        inputs = pad(inputs, (max(0, size - inputs.shape[-1]), 0))
        self._store(name, inputs[..., -size:])
        return inputs

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: object
    ) -> Tensor:
        """Store recurrent states and return them."""
        self._store(("recurrent", layer_idx, state_idx), recurrent_states)
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether rows continue from their states."""
        return isinstance(self.plan, DecodePlan)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: states are never taken back."""
        return False

    @property
    def layers(self) -> Sequence[LayerStates]:
        """The states by layer, for transformers before 5.21, which reads them there."""
        return [LayerStates(self, layer) for layer in range(1 + max(layer for _, layer, _ in self._states))]

    def copy_states(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the states in slots `sources` to slots `targets`, pairwise; all are read before any is written."""
        for state in self._states.values():
            state[list(targets)] = state[list(sources)]

    def clear_states(self, slots: Sequence[int]) -> None:
        """Set the states in `slots` to zero, those of a row without tokens."""
        for state in self._states.values():
            state[list(slots)] = 0

    def _state(self, name: StateName) -> Tensor | None:
        return self._states[name][: len(self.plan.positions)] if isinstance(self.plan, DecodePlan) else None

    def _store(self, name: StateName, new: Tensor) -> None:
        state, plan = self._states[name], self.plan
        if isinstance(plan, DecodePlan):
            state[: len(new)].copy_(new)
        elif plan.slots is not None and plan.prompts is not None:
            state.index_copy_(0, plan.slots, new.to(state.dtype).index_select(0, plan.prompts))

    # --- blocks --------------------------------------------------------------------------------------------------

    def copy(self, copies: Copies, *, renumbered: bool = False) -> None:
        """Copy blocks `copies.sources` to `copies.targets` in all layers; those only renumbered keep their slots."""
        if not copies.sources:
            return
        self._reserve(max(*copies.targets, *copies.sources) + 1)
        pairs = {False: np.asarray(copies, dtype=np.int64)}
        if self.table.windows is not None and not renumbered:
            self._reserve_slots(self.table.windows)
            pairs[True] = self.table.windows.of_block[pairs[False]]
        for windowed, (sources, targets) in pairs.items():
            for tensor in self._tensors(windowed=windowed):
                tensor.index_copy_(0, self._to(targets), tensor.index_select(0, self._to(sources)))

    def clear(self, blocks: Sequence[int]) -> None:
        """Set blocks to zero."""
        numbers = {False: np.asarray(blocks, dtype=np.int64)}
        if self.table.windows is not None:
            numbers[True] = self.table.windows.of_block[numbers[False]]
        for windowed, those in numbers.items():
            present = those[(those >= 0) & (those < self._present[windowed])]
            for tensor in self._tensors(windowed=windowed):
                tensor.index_fill_(0, self._to(present), 0.0)

    def _tensors(self, *, windowed: bool) -> Iterator[Tensor]:
        for layer, tensors in self._layers.items():
            if self._slides(layer) is windowed:
                yield from tensors

    def _slides(self, layer: int) -> bool:
        """Return whether a layer has slots, because of its sliding window."""
        return self.table.windows is not None and layer in self._shape.windowed

    def _entries(self, blocks: NDArray[np.int64], offsets: NDArray[np.int64]) -> dict[int, Tensor]:
        return {
            heads: self._to(
                ((blocks[:, None] * heads + np.arange(heads)) * self._shape.size + offsets[:, None]).reshape(-1)
            )
            for heads in self._heads
        }

    def _to(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device)

    def _reserve_slots(self, windows: WindowSlots) -> None:
        self._reserve(int(windows.of_block.max()) + 1, windowed=True)

    def _reserve(self, blocks: int, *, windowed: bool = False) -> None:
        if blocks <= self._present[windowed]:
            return
        present = min(max(2 * self._present[windowed], blocks), self._most[windowed])
        for number, layer in self._layers.items():
            for place, tensor in enumerate(layer if self._slides(number) is windowed else ()):
                grown = tensor.new_zeros((present, *tensor.shape[1:]))
                grown[: len(tensor)] = tensor
                layer[place] = grown  # one by one, so that each old tensor is freed before the next one grows
        self._present[windowed] = present  # last: if memory runs out, the next call grows all tensors again


def _put(blocks: Tensor, new: Tensor, entries: Mapping[int, Tensor]) -> None:
    """Store the tokens of `new` [N, H, D] at `entries` of `blocks` [.., H, size, D]."""
    _, heads, _, width = blocks.shape
    blocks.view(-1, width).index_copy_(0, entries[heads], new.reshape(-1, width))


def _filled(blocks: Tensor, new: Tensor, plan: PrefillPlan) -> Tensor:
    """Store prompts' keys or values [P, H, T, D]; return them after those that `blocks` hold before them."""
    tokens = new.transpose(1, 2).reshape(-1, new.shape[1], new.shape[3])
    _put(blocks, tokens.index_select(0, plan.sources), plan.entries)
    return new if plan.start == 0 else torch.cat((in_order(blocks, plan.before), new), dim=2)


def in_order(blocks: Tensor, table: Tensor) -> Tensor:
    """Copy blocks [N, H, size, D] into the order of a table i64 [P, n] → [P, H, n · size, D]."""
    prompts, count = table.shape
    _, heads, size, head_dim = blocks.shape
    rows = blocks.index_select(0, table.view(-1)).view(prompts, count, heads, size, head_dim)
    return rows.transpose(1, 2).reshape(prompts, heads, count * size, head_dim)
