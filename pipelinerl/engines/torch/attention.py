"""Attention over `PageCache`, registered with transformers, so that any model's own modules run on it unchanged.

A model asks transformers for a mask, and gets a `WantedMask` that says which one it wants; the cache's plan then makes
it, once per step. Scaling, sliding windows, soft caps and attention sinks are supported; an architecture that needs
more is rejected.

`BlockSections` lets a decode step read blocks in place: scores are computed block by block and then reordered by row,
because with D dimensions keys are D times larger than scores. The blocks of a step form two sections, so a prompt that
eight answers share is read twice, not eight times:

    first     every block, with the queries of one of its rows: one product over all blocks in use, in place
    shared    blocks of several rows, with the queries of their other rows, at most 16 at a time
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Final, NamedTuple, Never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from pipelinerl.engines.memory_budget import PREFILL_SCORES
from pipelinerl.engines.torch.page_cache import CacheReading, Chunk, DecodePlan, PrefillPlan, hidden_keys, in_order
from pipelinerl.errors import ModelError
from pipelinerl.numerics import torch_attention, torch_batch_invariant
from trainer_contract.types import Kernels

NAME: Final = "pipelinerl_rows"

#: The most rows that read one copy of a shared block.
_AT_ONCE: Final = 16
#: If at most this fraction of all blocks is in use, the used blocks are copied out; otherwise all are read in place.
_SPARSE: Final = 1 / 3
#: The plan of this thread's current forward. Some models do not pass their forward's arguments on to attention.
_PLAN: Final[ContextVar[PrefillPlan | DecodePlan | None]] = ContextVar("plan", default=None)
#: The sliding windows of the layers that attended, in order, while `windows_seen` is entered.
_SEEN: Final[ContextVar[list[int | None] | None]] = ContextVar("seen", default=None)

#: Arguments of transformers' attention interface that are not supported and would change the result.
_REFUSED: Final = ("position_bias", "head_mask", "indices", "topk_indices", "sparse_indices", "block_indices")


@contextmanager
def following(plan: PrefillPlan | DecodePlan) -> Iterator[None]:
    """Let attention use the cache as `plan` says."""
    token = _PLAN.set(plan)
    try:
        yield
    finally:
        _PLAN.reset(token)


@contextmanager
def windows_seen() -> Iterator[list[int | None]]:
    """Yield a list that gets the sliding window, or None, of each layer that attends in the block."""
    seen = list[int | None]()
    token = _SEEN.set(seen)
    try:
        yield seen
    finally:
        _SEEN.reset(token)


@dataclass(frozen=True, slots=True)
class WantedMask:
    """The mask that a model wants: causal, within a sliding window or a chunk if there is one."""

    window: int | Chunk | None

    def __getitem__(self, index: tuple[object, ...]) -> WantedMask:
        """Return the mask of the last queries; which these are follows from their number."""
        return self if all(isinstance(each, slice | int) for each in index) else self.dtype

    def __getattr__(self, name: str) -> Never:
        """Raise `ModelError`: only a model that changes its mask reads more of it."""
        if name.startswith("__"):
            raise AttributeError(name)
        raise ModelError("the model changes its attention mask, which this engine does not support; use another engine")


def wanted_mask(
    *,
    local_size: int | None = None,
    use_vmap: bool = False,
    mask_function: Callable[..., Tensor] | None = None,
    **others: object,
) -> WantedMask:
    """Return a model's mask, by transformers' interface. Raises `ModelError` if it changes what a causal mask hides."""
    if use_vmap:
        raise ModelError("the model has a mask of its own, which this engine does not support; use another engine")
    if local_size is None or local_size == 1 or mask_function is None:
        return WantedMask(local_size)
    row, own = torch.zeros((), dtype=torch.int64), torch.tensor(local_size)
    # a window reaches from here to the token before, a chunk begins here
    return WantedMask(local_size if mask_function(row, row, own, own - 1) else Chunk(local_size))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | WantedMask | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention by transformers' interface: query [B, Hq, T, D], key [B, H, L, D] and value [B, H, L, E] →
    [B, T, Hq, E]. Without a plan (`following`), attention is causal over the keys, without a cache.

    `s_aux` [Hq] are the scores of attention sinks. Raises `ModelError` if the architecture needs a term that is not
    implemented here.
    """
    unsupported = [name for name in _REFUSED if kwargs.get(name) is not None]
    window: int | Chunk | None = sliding_window
    if isinstance(attention_mask, WantedMask):
        window = attention_mask.window
    elif attention_mask is not None:
        unsupported.append("a mask of its own")
    if unsupported:
        raise ModelError(
            f"{type(module).__name__} needs {', '.join(unsupported)}, which this engine does not support; use another "
            "engine"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    plan = _PLAN.get()
    if (seen := _SEEN.get()) is not None:
        seen.append(None if isinstance(window, Chunk) else window)
    tempers: Any = module
    if isinstance(plan, DecodePlan) and getattr(module, "attn_temperature_tuning", False) and not tempers.use_rope:
        # Llama 4 scales the queries of a decode step by their positions (2501.19399), which differ by row.
        scales = torch.log1p(((plan.positions.float() + 1) / tempers.floor_scale).floor()) * tempers.attn_scale + 1
        query = (query * scales[:, :, None, None]).to(query.dtype)
    if plan is not None and isinstance(window, int) and plan.windowed is not None:
        plan = plan.windowed
    if isinstance(plan, DecodePlan):
        return attend_decode(query, key, value, plan, window, scale, softcap, s_aux).contiguous(), None
    reading = plan.reading if plan is not None else CacheReading.GATHERED
    return attend_prefill(query, key, value, reading, window, scale, softcap, s_aux).contiguous(), None


def attend_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: DecodePlan,
    window: int | Chunk | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with [K, Hq, 1, D] over blocks of keys [N, H, size, D] and values [N, H, size, E] → [K, 1, Hq, E]."""
    rows, q_heads, _, head_dim = query.shape
    in_kernel = plan.reading is CacheReading.KERNEL and sinks is None and keys.shape == values.shape
    if in_kernel and not isinstance(window, Chunk):
        # imported here, because it needs triton, which only CUDA builds of torch include
        from pipelinerl.engines.torch.paged_attention import attend_blocks

        # keys and values that a model has expanded from latents may be views
        blocks = keys.contiguous(), values.contiguous()
        out = attend_blocks(
            query[:, :, 0], *blocks, plan.table, plan.positions, window=window, scale=scale, softcap=softcap
        )
        return out.view(rows, 1, q_heads, head_dim)
    if plan.reading is CacheReading.TILES:
        window = _in_tiles(window, sinks)
        key, value = in_order(keys, plan.table), in_order(values, plan.table)
        return torch_batch_invariant.attend(
            query, key, value, plan.positions, window=window, scale=scale, softcap=softcap
        )
    mask = plan.mask(window, query.dtype)
    # Queries that share a key head form the rows of one matrix product.
    grouped = query.reshape(rows, keys.shape[1], -1, head_dim)
    by_head = None if sinks is None else sinks.float().view(1, *grouped.shape[1:3], 1)
    if plan.reading is CacheReading.IN_PLACE and plan.layout is not None:
        layout, (heads, group) = plan.layout, grouped.shape[1:3]
        if (sections := layout.sections.get((heads, group))) is None:
            sections = BlockSections.of(layout.own, layout.counts, heads=heads, group=group)
            layout.sections[heads, group] = sections
        return sections.attend(grouped, keys, values, mask, scale, softcap, by_head).view(rows, 1, q_heads, -1)
    key, value = in_order(keys, plan.table), in_order(values, plan.table)
    if softcap is None and sinks is None:  # use torch's attention, which sums in fp32 for every dtype
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    else:
        scores = capped(torch.matmul(grouped * scale, key.transpose(2, 3)).float(), softcap).add_(mask)
        out = torch.matmul(weights_of(scores, by_head).to(value.dtype), value)
    return out.reshape(rows, 1, q_heads, -1)


def _in_tiles(window: int | Chunk | None, sinks: Tensor | None) -> int | None:
    """Return the window; raise `ModelError` for what batch-invariant attention does not compute."""
    if isinstance(window, Chunk) or sinks is not None:
        lacks = "attention in chunks" if sinks is None else "attention sinks"
        raise ModelError(f"model.kernels=batch_invariant has no {lacks}, which this model has; leave it out")
    return window


def reading_for(device: torch.device, dtype: torch.dtype, kernels: Kernels) -> CacheReading:
    """Return the way (see `page_cache`) in which a decode step on `device` in `dtype` reads the cache's blocks."""
    if kernels is Kernels.BATCH_INVARIANT:
        return CacheReading.TILES
    if device.type == "cpu":
        return CacheReading.IN_PLACE if dtype is torch.float32 else CacheReading.GATHERED
    return CacheReading.KERNEL if find_spec("triton") else CacheReading.GATHERED


def attend_prefill(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    reading: CacheReading,
    window: int | Chunk | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally with the last T of L tokens: [P, Hq, T, D], [P, H, L, D], [P, H, L, E] → [P, T, Hq, E]."""
    length = key.shape[2]
    if reading is CacheReading.TILES:
        window = _in_tiles(window, sinks)
        own = torch.arange(length - query.shape[2], length)[None]
        return torch_batch_invariant.attend(query, key, value, own, window=window, scale=scale, softcap=softcap)
    size = window.size if isinstance(window, Chunk) else window
    window = None if size is None or length <= size else window
    if softcap is None and sinks is None and (query.is_cuda or window is None):
        return _in_kernel(query, key, value, window, scale).transpose(1, 2)
    key, value = torch_attention.repeated(query, key, value)
    by_head = None if sinks is None else sinks.float().view(1, -1, 1, 1)

    def products(queries: Tensor, hidden: Tensor) -> Tensor:
        scores = capped((torch.matmul(queries, key.transpose(2, 3)) * scale).float(), softcap)
        return torch.matmul(weights_of(scores.masked_fill_(hidden, -torch.inf), by_head).to(value.dtype), value)

    most = PREFILL_SCORES // (query.shape[0] * query.shape[1] * length)
    return _in_blocks(query, length, window, most, products).transpose(1, 2)


def _in_kernel(query: Tensor, key: Tensor, value: Tensor, window: int | Chunk | None, scale: float) -> Tensor:
    """Attend with a kernel of torch; the result is [P, Hq, T, D]."""
    length, count = key.shape[2], query.shape[2]
    masked = window is not None or length > count
    if query.is_cuda:
        if masked and window is None and torch_attention.fits_flash(query) and key.shape == value.shape:
            return torch_attention.attend_last(query, key, value, scale=scale)
        key, value = torch_attention.heads_for_kernel(query, key, value, masked=masked)
    attend = partial(scaled_dot_product_attention, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    if not masked:
        return attend(query, key, value, is_causal=True)
    # On a CPU, a result's bits depend on the number of queries, so all attend at once there.
    most = PREFILL_SCORES // length if query.is_cuda else count
    return _in_blocks(query, length, window, most, lambda part, hidden: attend(part, key, value, attn_mask=~hidden))


def _in_blocks(
    query: Tensor, length: int, window: int | Chunk | None, most: int, attend: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Bound the memory of scores: at most `most` queries [P, Hq, t, D], with their masks [t, L], attend at once."""
    keys, parts = torch.arange(length, device=query.device), []
    for part, own in zip(query.split(max(1, most), dim=2), keys[-query.shape[2] :].split(max(1, most)), strict=True):
        parts.append(attend(part, hidden_keys(keys, own[:, None], window)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def capped(scores: Tensor, softcap: float | None) -> Tensor:
    """Return scores bounded to ±`softcap` by tanh; unchanged for None."""
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


def weights_of(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of scores [K, H, G, L] over L. An attention sink, f32 [1, H, G, 1], takes weight as a further
    key without a value would.
    """
    if sinks is None:
        return scores.softmax(dim=-1)
    sinks = sinks.expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]


_NONE: Final = torch.empty(0, dtype=torch.int64)


class _Pairs(NamedTuple):
    blocks: NDArray[np.int64]
    rows: NDArray[np.int64]
    columns: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSections:
    """Indices for a step of K rows, each of at most n blocks; N blocks are read.

    G query heads share each of H key heads. In the second section, at most M rows attend to a block.

    Attributes:
        selected: the blocks to copy out i64 [N], or None for the first N in place.
        num_blocks: N.
        queries: i64 [N], for each block the row whose queries attend to it in the first section.
        to_rows: i64 [K · H · G · n], the index of the scores for each row, head and block.
        to_blocks: the inverse of `to_rows`: for each block of both sections, the indices in the scores by row.
        to_sums: i64 [n · K · H · G], the index of the weighted sum of values that each block of each row contributes.
        shared: i64 [S], the blocks of the second section, and `shared_queries` i64 [S · H · M] the row and head of each
            query; None if no block is shared.
        only: i64 [K], the block of each row if every row has a single block of its own. `to_rows`, `to_blocks` and
            `to_sums` are then empty, because scores need no reordering.
    """

    selected: Tensor | None
    num_blocks: int
    queries: Tensor
    to_rows: Tensor = _NONE
    to_blocks: Tensor = _NONE
    to_sums: Tensor = _NONE
    shared: Tensor | None = None
    shared_queries: Tensor | None = None
    only: Tensor | None = None

    @classmethod
    def of(cls, table: NDArray[np.int64], counts: NDArray[np.int64], *, heads: int, group: int) -> BlockSections:
        """Return the sections for rows whose blocks are in `table` [K, n]; in row i, the first counts[i] are valid."""
        width, per_block = table.shape[1], heads * group
        rows, columns = (np.arange(width) < counts[:, None]).nonzero()
        blocks = table[rows, columns]
        last = int(table.max()) + 1
        firsts = np.full(last, -1)
        firsts[blocks[::-1]] = np.arange(len(blocks))[::-1]  # backwards, so that a block's first entry wins
        used = (firsts >= 0).nonzero()[0]
        selected = None
        if len(used) <= _SPARSE * last:
            new = np.cumsum(firsts >= 0) - 1
            blocks, table, firsts, selected = new[blocks], new[table], firsts[used], torch.from_numpy(used)
        count = len(firsts)
        is_first = firsts[blocks] == np.arange(len(blocks))
        owners = np.maximum(firsts, 0)
        begun: dict[str, Any] = {"selected": selected, "num_blocks": count, "queries": torch.from_numpy(rows[owners])}
        if width == 1 and is_first.all():
            return cls(**begun, only=torch.from_numpy(blocks))
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
            more = head_rows * width + grid_columns[:, None, :, None]  # shape [S, H, M, G]
            to_blocks = np.concatenate((to_blocks, more.reshape(-1)))
            base[rest.rows, rest.columns] = total + (place * heads * most + member) * group
            stride[rest.rows, rest.columns] = most * group
            total += more.size
        places = base[..., None, None] + stride[..., None, None] * heads_of[:, None] + groups_of  # shape [K, n, H, G]
        to_rows = places.transpose(0, 2, 3, 1).reshape(-1)
        places[np.arange(width) >= counts[:, None]] = total  # padding refers to the row of zeros after all blocks
        to_sums = places.transpose(1, 0, 2, 3).reshape(-1)
        return cls(
            **begun,
            to_rows=torch.from_numpy(to_rows),
            to_blocks=torch.from_numpy(to_blocks),
            to_sums=torch.from_numpy(to_sums),
            shared=shared,
            shared_queries=shared_queries,
        )

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        mask: Tensor,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attend with queries [K, H, G, D] over blocks [.., H, size, D] → [K, H, G, D of values]. The additive `mask`
        has the shape [K, 1, 1, n · size].
        """
        rows, heads, group, head_dim = query.shape
        size, first, width = keys.shape[2], self.num_blocks * heads * group, values.shape[3]
        keys, values = (
            blocks[: self.num_blocks] if self.selected is None else blocks.index_select(0, self.selected)
            for blocks in (keys, values)
        )
        if self.only is not None:
            scores = query.new_empty(first, size)
            _products(query.index_select(0, self.queries), keys.transpose(2, 3), scores, scale)
            scores = capped(scores.view(-1, heads, group, size), softcap)
            weights = weights_of(scores.add_(mask.index_select(0, self.queries)), sinks)
            return torch.matmul(weights, values).index_select(0, self.only)
        in_all = len(self.to_blocks)
        scores = query.new_empty(in_all, size)
        _products(query.index_select(0, self.queries), keys.transpose(2, 3), scores[:first], scale)
        if self.shared is not None and self.shared_queries is not None:
            several = query.reshape(-1, group, head_dim).index_select(0, self.shared_queries)
            several = several.view(len(self.shared), heads, -1, head_dim)
            _products(several, keys.index_select(0, self.shared).transpose(2, 3), scores[first:], scale)
        scores = capped(scores.index_select(0, self.to_rows).view(rows, heads, group, -1), softcap)
        weights = weights_of(scores.add_(mask), sinks).reshape(-1, size).index_select(0, self.to_blocks)
        sums = query.new_empty(in_all + 1, width)
        sums[in_all:] = 0.0
        _products(weights[:first].view(-1, heads, group, size), values, sums[:first])
        if self.shared is not None:
            several = weights[first:].view(len(self.shared), heads, -1, size)
            _products(several, values.index_select(0, self.shared), sums[first:in_all])
        out = sums.index_select(0, self.to_sums).view(-1, rows * heads * group * width)
        return (out[0] if len(out) == 1 else out.sum(dim=0)).view(rows, heads, group, width)


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
    """Group (block, row) pairs by block. Return (blocks, indices, positions, M): the S blocks to read; for each pair,
    the index of its block among these, and the pair's position among the block's queries; and M, the most queries of a
    block. A block with over `_AT_ONCE` pairs is listed several times.
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


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, wanted_mask)
