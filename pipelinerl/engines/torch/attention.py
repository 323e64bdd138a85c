"""Attention over `PageCache`, registered with transformers, so that any model's own modules run on it unchanged.

A model asks transformers for a mask, and gets a `WantedMask` that says which one it wants; the cache's plan then makes
it, once per step. Scaling, sliding windows, soft caps and attention sinks are supported; an architecture that needs
more is rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Final, Never, final

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from pipelinerl.engines.memory_budget import PREFILL_SCORES
from pipelinerl.engines.torch.page_cache import CacheReading, DecodePlan, PrefillPlan, capped, in_order, weights_of
from pipelinerl.errors import ModelError
from pipelinerl.numerics import torch_attention, torch_batch_invariant
from trainer_contract.types import Kernels

NAME: Final = "pipelinerl_rows"

#: The plan of this thread's current forward. Some models do not pass their forward's arguments on to attention.
_PLAN: Final[ContextVar[PrefillPlan | DecodePlan | None]] = ContextVar("plan", default=None)

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


@final
@dataclass(frozen=True, slots=True)
class WantedMask:
    """The mask that a model wants: causal, within a sliding window if there is one."""

    window: int | None

    def __getitem__(self, index: object) -> Never:
        raise ModelError("the model changes its attention mask, which this engine does not support; use another engine")


def wanted_mask(*, local_size: int | None = None, use_vmap: bool = False, **others: object) -> WantedMask:
    """Return the mask that a model wants, by transformers' interface of functions that make masks.

    Raises `ModelError` if the model changes which keys a causal mask hides.
    """
    if use_vmap:
        raise ModelError("the model has a mask of its own, which this engine does not support; use another engine")
    return WantedMask(local_size)


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
    if isinstance(attention_mask, WantedMask):
        sliding_window = attention_mask.window
    elif attention_mask is not None:
        unsupported.append("a mask of its own")
    if unsupported:
        raise ModelError(
            f"{type(module).__name__} needs {', '.join(unsupported)}, which this engine does not support; use another "
            "engine"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    plan = _PLAN.get()
    if isinstance(plan, DecodePlan):
        return attend_decode(query, key, value, plan, sliding_window, scale, softcap, s_aux).contiguous(), None
    reading = plan.reading if plan is not None else CacheReading.GATHERED
    return attend_prefill(query, key, value, reading, sliding_window, scale, softcap, s_aux).contiguous(), None


def attend_decode(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: DecodePlan,
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with one query per row [K, Hq, 1, D] over blocks of keys [N, H, size, D] and values [N, H, size, E] →
    [K, 1, Hq, E].
    """
    rows, q_heads, _, head_dim = query.shape
    if plan.reading is CacheReading.KERNEL and sinks is None and keys.shape == values.shape:
        # imported here, because it needs triton, which only CUDA builds of torch include
        from pipelinerl.engines.torch.paged_attention import attend_blocks

        out = attend_blocks(
            query[:, :, 0], keys, values, plan.table, plan.positions, window=window, scale=scale, softcap=softcap
        )
        return out.view(rows, 1, q_heads, head_dim)
    if plan.reading is CacheReading.TILES:
        _refuse_sinks(sinks)
        key, value = in_order(keys, plan.table), in_order(values, plan.table)
        return torch_batch_invariant.attend(
            query, key, value, plan.positions, window=window, scale=scale, softcap=softcap
        )
    mask = plan.mask(window, query.dtype)
    # Queries that share a key head form the rows of one matrix product.
    grouped = query.reshape(rows, keys.shape[1], -1, head_dim)
    by_head = None if sinks is None else sinks.float().view(1, *grouped.shape[1:3], 1)
    if plan.reading is CacheReading.IN_PLACE and plan.layout is not None:
        sections = plan.layout.sections(*grouped.shape[1:3])
        return sections.attend(grouped, keys, values, mask, scale, softcap, by_head).view(rows, 1, q_heads, -1)
    key, value = in_order(keys, plan.table), in_order(values, plan.table)
    if softcap is None and sinks is None:  # use torch's attention, which sums in fp32 for every dtype
        out = scaled_dot_product_attention(grouped, key, value, attn_mask=mask, scale=scale)
    else:
        scores = capped(torch.matmul(grouped * scale, key.transpose(2, 3)).float(), softcap).add_(mask)
        out = torch.matmul(weights_of(scores, by_head).to(value.dtype), value)
    return out.reshape(rows, 1, q_heads, -1)


def _refuse_sinks(sinks: Tensor | None) -> None:
    if sinks is not None:
        raise ModelError("model.kernels=batch_invariant has no attention sinks, which this model has; leave it out")


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
    window: int | None,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend causally with the last T of L tokens: query [P, Hq, T, D], key [P, H, L, D] and value [P, H, L, E] →
    [P, T, Hq, E].
    """
    length = key.shape[2]
    if reading is CacheReading.TILES:
        _refuse_sinks(sinks)
        own = torch.arange(length - query.shape[2], length)[None]
        return torch_batch_invariant.attend(query, key, value, own, window=window, scale=scale, softcap=softcap)
    window = window if window is not None and length > window else None
    if softcap is None and sinks is None and (query.is_cuda or window is None):
        return _in_kernel(query, key, value, window, scale).transpose(1, 2)
    key, value = torch_attention.repeated(query, key, value)
    by_head = None if sinks is None else sinks.float().view(1, -1, 1, 1)

    def products(queries: Tensor, hidden: Tensor) -> Tensor:
        scores = capped((torch.matmul(queries, key.transpose(2, 3)) * scale).float(), softcap)
        return torch.matmul(weights_of(scores.masked_fill_(hidden, -torch.inf), by_head).to(value.dtype), value)

    most = PREFILL_SCORES // (query.shape[0] * query.shape[1] * length)
    return _in_blocks(query, length, window, most, products).transpose(1, 2)


def _in_kernel(query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float) -> Tensor:
    """Attend with a kernel of torch; the result is [P, Hq, T, D]."""
    length, count = key.shape[2], query.shape[2]
    masked = window is not None or length > count
    if query.is_cuda:
        if masked and window is None and torch_attention.fits_flash(query):
            return torch_attention.attend_last(query, key, value, scale=scale)
        key, value = torch_attention.heads_for_kernel(query, key, value, masked=masked)
    attend = partial(scaled_dot_product_attention, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    if not masked:
        return attend(query, key, value, is_causal=True)
    # On a CPU, a result's bits depend on the number of queries, so all attend at once there.
    most = PREFILL_SCORES // length if query.is_cuda else count
    return _in_blocks(query, length, window, most, lambda part, hidden: attend(part, key, value, attn_mask=~hidden))


def _in_blocks(
    query: Tensor, length: int, window: int | None, most: int, attend: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Let at most `most` queries attend at once, which bounds the memory of masks and scores; join the results.

    `attend` takes queries [P, Hq, t, D] of the last of `length` tokens, and a mask [t, L] of the keys hidden from them.
    """
    keys, parts = torch.arange(length, device=query.device), []
    for part, own in zip(query.split(max(1, most), dim=2), keys[-query.shape[2] :].split(max(1, most)), strict=True):
        distance = own[:, None] - keys
        hidden = (distance < 0) | (distance >= window) if window is not None else distance < 0
        parts.append(attend(part, hidden))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, wanted_mask)
