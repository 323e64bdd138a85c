"""A fake of torch's varlen attention kernel for CPUs, which rejects the same arguments as the kernel.

`test_varlen.py` compares it with torch's own attention.
"""

from itertools import pairwise

import torch


def varlen_attention(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa, sinks=None
):
    """Compute causal attention within each segment; the last query of a segment attends to all keys of the segment."""
    for starts, most, of in ((cu_seq_q, max_q, query), (cu_seq_k, max_k, key)):
        lengths = starts.diff()
        assert starts.dtype == torch.int32 and starts.is_contiguous() and starts[0] == 0 and starts[-1] == len(of)
        assert lengths.min() > 0 and lengths.max() == most
    assert sinks is None, "torch's kernel takes none"
    assert key.shape == value.shape and len({query.dtype, key.dtype, value.dtype}) == 1
    assert all(each.stride(-1) == 1 for each in (query, key, value))
    assert query.shape[2] == key.shape[2] and query.shape[2] % 8 == 0 and query.shape[2] <= 256
    assert query.shape[1] % key.shape[1] == 0 and enable_gqa is (query.shape[1] != key.shape[1])
    assert window_size[0] >= -1 and window_size[1] == 0
    parts = [
        torch.einsum("hqk,khd->qhd", scores.softmax(-1), _repeated(query, value)[keys])
        for _, keys, scores in _scores(query, key, cu_seq_q, cu_seq_k, scale, window_size[0])
    ]
    return torch.cat(parts)


class VarlenOperators:
    """Fakes of the two operators behind torch's kernel: its output with the normalisers, and its gradients."""

    @staticmethod
    def _varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale, window_size, enable_gqa):
        assert is_causal is (window_size == [-1, 0])
        bounds = (cu_seq_q, cu_seq_k, max_q, max_k)
        out = varlen_attention(
            *(query, key, value, *bounds), scale=scale, window_size=tuple(window_size), enable_gqa=enable_gqa
        )
        scores = _scores(query, key, cu_seq_q, cu_seq_k, scale, window_size[0])
        return out, torch.cat([each.logsumexp(-1) for _, _, each in scores], dim=1), torch.zeros(2)

    @staticmethod
    def _varlen_attn_backward(
        grad,
        query,
        key,
        value,
        out,
        normaliser,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        is_causal,
        random,
        scale,
        window_size,
    ):
        """Compute FlashAttention's algorithm 4 (2205.14135): shares come from `normaliser`, their sum from `out`."""
        slopes, values = [torch.zeros_like(each) for each in (query, key, value)], _repeated(query, value)
        whole = _repeated(query, key)
        for queries, keys, scores in _scores(query, key, cu_seq_q, cu_seq_k, scale, window_size[0]):
            shares = (scores - normaliser[:, queries, None]).exp()
            of_value = torch.einsum("hqk,qhd->khd", shares, grad[queries])
            of_shares = torch.einsum("qhd,khd->hqk", grad[queries], values[keys])
            of_scores = shares * (of_shares - (grad[queries] * out[queries]).sum(-1).T[..., None]) * scale
            slopes[0][queries] += torch.einsum("hqk,khd->qhd", of_scores, whole[keys])
            of_key = torch.einsum("hqk,qhd->khd", of_scores, query[queries])
            for slope, each in zip(slopes[1:], (of_key, of_value), strict=True):
                slope[keys] += each.unflatten(1, (key.shape[1], -1)).sum(2)
        return tuple(slopes)


def _repeated(query, each):
    return each.repeat_interleave(query.shape[1] // each.shape[1], dim=1)


def _scores(query, key, cu_seq_q, cu_seq_k, scale, before):
    """Yield, for each segment, its rows of queries and of keys, and its masked scores [H, queries, keys]."""
    key, scale = _repeated(query, key), query.shape[2] ** -0.5 if scale is None else scale
    for (first, end), (first_key, end_key) in zip(
        pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True
    ):
        queries, keys = end - first, end_key - first_key
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        hidden = (distance < 0) | (distance > (before if before >= 0 else keys))
        scores = torch.einsum("qhd,khd->hqk", query[first:end], key[first_key:end_key]) * scale
        yield slice(first, end), slice(first_key, end_key), scores.masked_fill(hidden, -torch.inf)
