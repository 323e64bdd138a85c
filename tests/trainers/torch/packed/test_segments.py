"""Attention over packed segments, compared with one large masked attention in value and gradient."""

import numpy as np
import pytest
import torch

from pipelinerl.numerics import torch_attention
from pipelinerl.trainers.torch.packed.attention import Scores
from pipelinerl.trainers.torch.packed.segments import SegmentPlan

LENGTHS = {
    "uniform": [7] * 5,
    "ragged": [3, 1, 8, 5],
    "buckets": [40, 2, 33, 90, 1, 41, 32],
    "one": [9],
    "of one token": [1, 1, 1],
}


def masked_attention(q, k, v, positions, scores):
    """Return attention [T, H, d] by one large mask, from query [T, H, d], key and value [T, H_kv, d]."""
    segments, distance = (positions == 0).cumsum(0), positions[:, None] - positions
    mask = (segments[:, None] == segments) & (distance >= 0) & (distance < (scores.window or len(positions)))
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
    products = torch.einsum("qhd,khd->hqk", q, k) * scores.scale
    if scores.cap is not None:
        products = scores.cap * torch.tanh(products / scores.cap)
    products = products.masked_fill(~mask, -torch.inf)
    if scores.sinks is not None:
        products = torch.cat((products, scores.sinks[:, None, None].expand(-1, len(positions), 1)), dim=-1)
    return torch.einsum("hqk,khd->qhd", products.softmax(-1)[..., : len(positions)], v)


@pytest.mark.parametrize("held", [2**24, 2000], ids=["whole", "pieces"])
@pytest.mark.parametrize("cap", [None, 0.5])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("name", ["uniform", "buckets", "of one token"])
def test_attention_in_buckets_of_similar_segment_lengths_equals_masked_attention(
    name, window, has_sinks, cap, held, monkeypatch
):
    monkeypatch.setitem(torch_attention.SCORES_AT_ONCE, "cpu", held)
    positions = np.concatenate([np.arange(length) for length in LENGTHS[name]]).astype(np.int32)
    draw = torch.Generator().manual_seed(0)
    sizes = [(len(positions), heads, 8) for heads in (4, 2, 2)] + [(4,)]
    q, k, v, sinks = drawn = [
        torch.randn(size, dtype=torch.float64, generator=draw, requires_grad=True) for size in sizes
    ]
    scores = Scores(window, 0.3, cap, sinks if has_sinks else None)
    wanted = masked_attention(q, k, v, torch.from_numpy(positions), scores)
    got = SegmentPlan.of(positions, torch.device("cpu")).attend(q, k, v, scores)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)
    cotangent, taking = torch.randn(wanted.shape, generator=draw), drawn[: 4 if has_sinks else 3]
    gradients = (torch.autograd.grad(each, taking, cotangent) for each in (got, wanted))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", LENGTHS)
def test_segment_plan_puts_each_token_into_one_row_of_a_bucket_with_little_padding(name):
    positions = np.concatenate([np.arange(length) for length in LENGTHS[name]]).astype(np.int32)
    plan = SegmentPlan.of(positions, torch.device("cpu"))
    assert torch.equal(plan.token_of_row[plan.row_of_token], torch.arange(len(positions)))
    assert sum(count * length for count, length in plan.buckets) == len(plan.token_of_row)
    assert (plan.is_first is None) == (name in ("uniform", "one", "of one token"))
    lengths, start = sorted(LENGTHS[name]), 0
    for count, longest in plan.buckets:
        members = lengths[start : start + count]
        assert members[-1] == longest and (longest <= 16 or longest <= 1.25 * members[0] + 1)
        start += count
