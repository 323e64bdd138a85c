"""Attention over `RowCache`, registered with transformers, so that any model's own modules run on it unchanged.

transformers builds no mask for an unknown implementation, which suits this one: masks are made once per step from the
cache's plan. Supported are scaling, sliding windows and soft caps. An architecture that needs more is rejected.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from pipelinerl.engines.torch.row_cache import DecodePlan, PrefillPlan
from pipelinerl.errors import ModelError

NAME: Final = "pipelinerl_rows"

#: Unsupported arguments that would change the result.
_REFUSED: Final = ("s_aux", "position_bias", "head_mask")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: PrefillPlan | DecodePlan,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention by transformers' interface: query [B, Hq, T, D], key and value [B, H, L, D] → [B, T, Hq, D].

    Raises:
        ModelError: the architecture needs a term that is not implemented here.
    """
    unsupported = [name for name in _REFUSED if kwargs.get(name) is not None]
    if sliding_window is None and getattr(module, "layer_type", None) == "sliding_attention":
        unsupported.append("a sliding window given by its mask alone")
    if unsupported or attention_mask is not None:
        raise ModelError(
            f"{type(module).__name__} needs {', '.join(unsupported) or 'a mask of its own'}, which this engine does "
            "not support"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if isinstance(plan, DecodePlan):
        return attend_decode(query, key, value, plan, sliding_window, scale, softcap), None
    return attend_prefill(query, key, value, sliding_window, scale, softcap), None


def attend_decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    plan: DecodePlan,
    window: int | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Attend with one query per fed row [K, Hq, 1, D] over the rows' cache [B, H, L, D] → [K, 1, Hq, D]."""
    mask = plan.mask(window, query.dtype)
    if plan.gathers_fed:
        key, value, mask = (plan.to_fed(tensor) for tensor in (key, value, mask))
    else:
        query = plan.to_rows(query)
    batch, q_heads, _, head_dim = query.shape
    heads, common = key.shape[1], plan.common_length
    # The queries that share a key head form the rows of one product.
    grouped = query.reshape(batch, heads, q_heads // heads, head_dim)
    out = _attend_rows(grouped, key[:, :, :common], value[:, :, :common], mask[..., :common], scale, softcap)
    if plan.long_rows is not None:
        rows = plan.long_rows
        few = [tensor.index_select(0, rows) for tensor in (grouped, key, value, mask)]
        out.index_copy_(0, rows, _attend_rows(few[0], few[1], few[2], few[3], scale, softcap))
    out = out if plan.gathers_fed else plan.to_fed(out)
    return out.reshape(-1, 1, q_heads, value.shape[-1])


def _attend_rows(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None
) -> Tensor:
    """Attend with queries [B, H, G, D] over keys, values [B, H, L, D], additive mask [B, 1, 1, L] → [B, H, G, D]."""
    if query.dtype != torch.float32 and softcap is None:  # sums in fp32 for every dtype
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    # With one query per row, two plain products are faster than the fused kernel on a CPU.
    scores = _capped(torch.matmul(query * scale, key.transpose(2, 3)).float(), softcap).add_(mask)
    return torch.matmul(scores.softmax(dim=-1).to(value.dtype), value)


def attend_prefill(
    query: Tensor, key: Tensor, value: Tensor, window: int | None, scale: float, softcap: float | None = None
) -> Tensor:
    """Compute causal attention of prompts: the last T of L tokens [P, Hq, T, D] over key and value [P, H, L, D].

    Returns:
        [P, T, Hq, D].
    """
    length, before, shared = query.shape[2], key.shape[2] - query.shape[2], query.shape[1] // key.shape[1]
    windowed = window is not None and before + length > window
    if softcap is None and not windowed and before == 0:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=shared > 1)
        return out.transpose(1, 2)
    entries = torch.arange(before + length, device=query.device)
    distance = entries[before:, None] - entries[None, :]
    hidden = (distance < 0) | (distance >= window) if window is not None else distance < 0
    if softcap is None and not windowed:
        out = scaled_dot_product_attention(query, key, value, attn_mask=~hidden, scale=scale, enable_gqa=shared > 1)
        return out.transpose(1, 2)
    key, value = key.repeat_interleave(shared, dim=1), value.repeat_interleave(shared, dim=1)
    scores = _capped((torch.matmul(query, key.transpose(2, 3)) * scale).float(), softcap)
    out = torch.matmul(scores.masked_fill_(hidden, -torch.inf).softmax(dim=-1).to(value.dtype), value)
    return out.transpose(1, 2)


def _capped(scores: Tensor, softcap: float | None) -> Tensor:
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap


AttentionInterface.register(NAME, attend)
