"""Batch-invariant layers on a CPU: a token's result has the same bits whatever else is computed with it.

Matrix libraries choose the order of a sum by the shape of the product, so results depend on the number of tokens
computed together. Engine and trainer batch tokens differently. With these layers in both, their log-probs are equal to
the bit, as in "Defeating Nondeterminism in LLM Inference" (He et al., Thinking Machines, 2025) on GPUs.

Every product has the same shape: rows are computed in tiles of `_ROWS`, attention keys in tiles of `_KEYS`, in order,
and the last tile is filled up with zeros. `probed` checks that this suffices on the machine at hand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

#: Number of rows in each matrix product.
_ROWS: Final = 32
#: Number of attention keys in a tile.
_KEYS: Final = 64
#: Numbers of tokens in the batches that `probed` compares: below and above sizes at which matrix libraries switch
#: algorithms.
_PROBED: Final = (1, 2, 5, 17, 40, 100)


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ + bias: […, in] → […, out]."""
    rows = x.numel() // x.shape[-1]
    tiles = pad(x.reshape(rows, -1), (0, 0, 0, -rows % _ROWS)).split(_ROWS)
    return torch.cat([linear(tile, weight, bias) for tile in tiles])[:rows].view(*x.shape[:-1], -1)


class InvariantLinear:
    """Replaces the forward method of a linear layer. It reads the parameters at each call, so they may be replaced."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        """Map […, in] to […, out]."""
        return product(x, self._layer.weight, self._layer.bias)


def use_in(model: nn.Module) -> None:
    """Make the linear layers of a model batch-invariant, except for those whose forward is already replaced."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and "forward" not in vars(layer):
            setattr(layer, "forward", InvariantLinear(layer))  # noqa: B010  # a module's attributes have no types


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    *,
    window: int | None,
    scale: float,
    softcap: float | None = None,
) -> Tensor:
    """Return causal attention [B, T, Hq, D], with a running softmax in fp32.

    Source: FlashAttention 2 (2307.08691), algorithm 1.

    Args:
        query: [B, Hq, T, D].
        key: [B, H, L, D], and `value` likewise; entry n belongs to position n.
        positions: i64 [B, T] or [1, T], the queries' positions; a query attends to the entries up to its own position.
        window: number of last entries to which a query attends; None for all.
        scale: factor of the scores.
        softcap: largest absolute value of a score; None sets no bound.
    """
    batch, q_heads, length, width = query.shape
    heads, group = key.shape[1], q_heads // key.shape[1]
    rows, spare = length * group, -(length * group) % _ROWS
    # Stack the queries that share a key head as rows of one matrix: [B · H, T · group, D].
    grouped = query.view(batch, heads, group, length, width).transpose(2, 3).reshape(batch * heads, rows, width)
    own = pad(positions.expand(batch, length).repeat_interleave(group, dim=1), (0, spare))
    own = own.repeat_interleave(heads, dim=0)[:, :, None]
    key, value = (
        pad(each, (0, 0, 0, -each.shape[2] % _KEYS)).reshape(batch * heads, -1, width) for each in (key, value)
    )
    tiles = zip(pad(grouped, (0, 0, 0, spare)).split(_ROWS, dim=1), own.split(_ROWS, dim=1), strict=True)
    attended = torch.cat([_attend_tile(*tile, key, value, window, scale, softcap) for tile in tiles], dim=1)[:, :rows]
    attended = attended.to(query.dtype).view(batch, heads, length, group, width).transpose(1, 2)
    return attended.reshape(batch, length, q_heads, width)


def _attend_tile(
    query: Tensor,
    own: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Return attention, f32 [N, _ROWS, D], of queries [N, _ROWS, D] at positions `own` [N, _ROWS, 1]; N is B · H."""
    most, total, sums = torch.full(own.shape, -torch.inf), torch.zeros(own.shape), torch.zeros(query.shape)
    for start in range(0, int(own.max()) + 1, _KEYS):
        tile, entries = slice(start, start + _KEYS), torch.arange(start, start + _KEYS)
        hidden = entries > own if window is None else (entries > own) | (entries <= own - window)
        scores = torch.bmm(query, key[:, tile].transpose(1, 2)).float() * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores.masked_fill(hidden, -torch.inf)
        larger = torch.maximum(most, scores.detach().amax(dim=-1, keepdim=True))
        # Keep the softmax's shift finite, even if the window hides the whole tile.
        shift = larger.clamp(min=torch.finfo(torch.float32).min)
        faded, exps = (most - shift).exp(), (scores - shift).exp()
        total = total * faded + exps.sum(dim=-1, keepdim=True)
        sums = sums * faded + torch.bmm(exps.to(value.dtype), value[:, tile]).float()
        most = larger
    return sums / total


def probed(results: Callable[[int], Any]) -> bool:
    """Return whether `results(count)`, the first token's result in a batch of `count`, is always the same."""
    first = [results(count) for count in _PROBED]
    return all(each == first[0] for each in first)
