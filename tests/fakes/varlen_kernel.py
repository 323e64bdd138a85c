"""A fake of torch's varlen attention kernel for CPUs, which rejects the same arguments as the kernel.

`test_varlen.py` compares it with torch's own attention.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Compute causal attention within each segment; the last query of a segment attends to all keys of the segment."""
    for starts, most, of in ((cu_seq_q, max_q, query), (cu_seq_k, max_k, key)):
        lengths = starts.diff()
        assert starts.dtype == torch.int32 and starts.is_contiguous() and starts[0] == 0 and starts[-1] == len(of)
        assert lengths.min() > 0 and lengths.max() == most
    assert key.shape == value.shape and len({query.dtype, key.dtype, value.dtype}) == 1
    assert all(each.stride(-1) == 1 for each in (query, key, value))
    assert query.shape[2] == key.shape[2] and query.shape[2] % 8 == 0 and query.shape[2] <= 256
    assert query.shape[1] % key.shape[1] == 0 and enable_gqa is (query.shape[1] != key.shape[1])
    before, after = window_size
    assert before >= -1 and after == 0
    repeats = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
    scale = query.shape[2] ** -0.5 if scale is None else scale
    attended = []
    for (first, end), (first_key, end_key) in zip(
        pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True
    ):
        queries, keys = end - first, end_key - first_key
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        hidden = (distance < 0) | (distance > (before if before >= 0 else keys))
        scores = torch.einsum("qhd,khd->hqk", query[first:end], key[first_key:end_key]) * scale
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        attended.append(torch.einsum("hqk,khd->qhd", shares, value[first_key:end_key]))
    return torch.cat(attended)
