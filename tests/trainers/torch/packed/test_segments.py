"""Attention over packed segments, compared with one large masked attention in value and gradient."""

import numpy as np
import pytest
import torch

from pipelinerl.trainers.torch.packed.attention import attend
from pipelinerl.trainers.torch.packed.segments import SegmentPlan

LENGTHS = {
    "uniform": [7] * 5,
    "ragged": [3, 1, 8, 5],
    "buckets": [40, 2, 33, 90, 1, 41, 32],
    "one": [9],
    "of one token": [1, 1, 1],
}


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("name", LENGTHS)
def test_attention_in_buckets_of_similar_segment_lengths_equals_masked_attention(name, kv_heads, window):
    positions = np.concatenate([np.arange(length) for length in LENGTHS[name]]).astype(np.int32)
    segments = torch.from_numpy(np.cumsum(positions == 0))
    total = len(positions)
    draw = torch.Generator().manual_seed(0)
    heads = (4, kv_heads, kv_heads)
    q, k, v = (torch.randn(1, h, total, 8, dtype=torch.float64, generator=draw, requires_grad=True) for h in heads)
    distance = torch.arange(total)[:, None] - torch.arange(total)
    mask = (segments[:, None] == segments) & (distance >= 0) & (distance < (window or total))
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    wanted = wanted.transpose(1, 2)
    cotangent = torch.randn(wanted.shape, dtype=torch.float64, generator=draw)
    expected = torch.autograd.grad(wanted, (q, k, v), cotangent)

    plan = SegmentPlan.of(positions, torch.device("cpu"))
    got, _ = attend(torch.nn.Identity(), q, k, v, None, segments=plan, scaling=0.3, sliding_window=window)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-12)
    for ours, theirs in zip(torch.autograd.grad(got, (q, k, v), cotangent), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


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
