"""Choices among the kernels of torch's `scaled_dot_product_attention` on CUDA; on a CPU nothing changes.

Torch tries cuDNN first on recent GPUs, then flash attention, then memory-efficient attention, and last plain products,
which keep all scores in fp32. Flash attention has no fp32 and takes no mask. Until torch 2.13 at least, the
memory-efficient kernel needs as many key heads as query heads.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_FLASH_DTYPES: Final = (torch.bfloat16, torch.float16)
#: The oldest compute capability on which flash attention runs.
_FLASH_CAPABILITY: Final = (8, 0)
#: Largest number of scores that `attend_scores` holds at once, by type of device.
SCORES_AT_ONCE: Final = {"cpu": 2**24, "cuda": 2**27}
#: Flash attention takes heads whose width is a multiple of the first number and at most the second.
_FLASH_WIDTHS: Final = (8, 256)


def avoid_cudnn() -> None:
    """Exclude cuDNN from torch's attention in this process: it plans each new shape for tens of ms."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def fits_flash(query: Tensor) -> bool:
    """Return whether flash attention without a mask takes the query's dtype, which autocast may change, and width, and
    runs on its GPU.
    """
    kind, (multiple, most) = query.device.type, _FLASH_WIDTHS
    if query.is_cuda and torch.cuda.get_device_capability(query.device) < _FLASH_CAPABILITY:
        return False
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    return dtype in _FLASH_DTYPES and query.shape[-1] % multiple == 0 and query.shape[-1] <= most


def heads_for_kernel(query: Tensor, key: Tensor, value: Tensor, *, masked: bool) -> tuple[Tensor, Tensor]:
    """Return key and value for a kernel on CUDA, with repeated heads unless flash attention can share them."""
    return (key, value) if fits_flash(query) and not masked else repeated(query, key, value)


def attend_last(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """Compute causal attention of the last T of L tokens with flash attention; CUDA only, if `fits_flash`.

    The operator aligns its causal mask with the last key. `torch.nn.attention.bias.causal_lower_right` calls it too,
    but creates a tensor [2, T, L] in the host's memory.
    """
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, is_causal=True, scale=scale)[0]
    return out


def repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return key and value with each head repeated for the query heads that share it."""
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)


def attend_scores(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None,
    scale: float,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Return causal attention [n, H, T, d] by plain products, for what torch's kernels lack.

    With more than `SCORES_AT_ONCE` scores, queries are processed in pieces, and backward recomputes each piece.

    Args:
        query: [n, H, T, d]; key and value [n, H_kv, T, d].
        window: number of positions that a query sees, including its own; None for all earlier ones.
        cap: largest absolute value of a score, by tanh; None sets no bound.
        sinks: [H], one more score per head, which takes its share of the softmax and has no value; or None.
    """
    key, value = repeated(query, key, value)
    count, heads, length, _ = query.shape
    rows = max(1, SCORES_AT_ONCE[query.device.type] // (count * heads * length))

    def piece(queries: Tensor, start: int) -> Tensor:
        end = start + queries.shape[2]
        first = 0 if window is None else max(0, start + 1 - window)
        scores = (queries @ key[:, :, first:end].transpose(2, 3)).float() * scale
        if cap is not None:
            scores = cap * torch.tanh(scores / cap)
        place = torch.arange(first, end, device=query.device)
        distance = place[start - first :, None] - place
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(*scores.shape[:3], 1)), dim=-1)
        shares = scores.softmax(-1)[..., : end - first]
        return shares.to(value.dtype) @ value[:, :, first:end]

    if rows >= length:
        return piece(query, 0)
    pieces = [
        checkpoint(piece, part, start, use_reentrant=False, preserve_rng_state=False)
        for start, part in zip(range(0, length, rows), query.split(rows, dim=2), strict=True)
    ]
    return torch.cat(pieces, dim=2)
