"""A prefill's attention equals plain products in fp64, with a window, a soft cap, and queries that attend in blocks."""

import pytest
import torch

from pipelinerl.engines.torch import attention
from pipelinerl.engines.torch.attention import attend_prefill
from pipelinerl.engines.torch.page_cache import CacheReading
from pipelinerl.numerics import torch_attention

SCALE = 0.3


def _drawn(cached, dtype):
    """Return queries of 19 tokens that follow `cached` ones, keys and values; of two prompts, with 4 and 2 heads."""
    draw = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(2, heads, length, 16, generator=draw).to(dtype)
        for heads, length in ((4, 19), (2, cached + 19), (2, cached + 19))
    )


def _plain(query, key, value, window, softcap):
    query, key, value = query.double(), *(each.double().repeat_interleave(2, dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * SCALE
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    length = key.shape[2]
    distance = torch.arange(length - query.shape[2], length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (window or length))
    return (scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("cached", [0, 32])
def test_prefill_attention_equals_plain_products(cached, window, softcap, device, dtype):
    drawn = _drawn(cached, dtype)
    moved = (each.to(device) for each in drawn)
    out = attend_prefill(*moved, CacheReading.GATHERED, window, SCALE, softcap)
    within = 1e-5 if dtype is torch.float32 else 3e-2
    torch.testing.assert_close(out.cpu().double(), _plain(*drawn, window, softcap), rtol=within, atol=within)


@pytest.mark.parametrize("queries", [1, 4, 7])
@pytest.mark.parametrize(("window", "softcap"), [(7, None), (None, 2.0), (7, 2.0)])
def test_queries_whose_scores_exceed_the_bound_attend_in_blocks_with_equal_results(
    window, softcap, queries, monkeypatch
):
    query, key, value = _drawn(32, torch.float32)
    at_once = attend_prefill(query, key, value, CacheReading.GATHERED, window, SCALE, softcap)
    monkeypatch.setattr(attention, "PREFILL_SCORES", queries * 2 * 4 * key.shape[2])
    computed = []
    masked = torch.Tensor.masked_fill_

    def recorded(scores, *args):
        computed.append(scores.numel())
        return masked(scores, *args)

    monkeypatch.setattr(torch.Tensor, "masked_fill_", recorded)
    in_blocks = attend_prefill(query, key, value, CacheReading.GATHERED, window, SCALE, softcap)
    torch.testing.assert_close(in_blocks, at_once, rtol=1e-6, atol=1e-6)
    assert len(computed) == -(-19 // queries) and max(computed) <= attention.PREFILL_SCORES


@pytest.mark.parametrize(
    ("dtype", "width", "fits"),
    [(torch.bfloat16, 128, True), (torch.bfloat16, 512, False), (torch.float16, 20, False), (torch.float32, 64, False)],
)
def test_flash_attention_is_used_for_half_precision_and_heads_of_supported_width(dtype, width, fits):
    assert torch_attention.fits_flash(torch.empty(1, 2, 3, width, dtype=dtype)) is fits


def test_flash_attention_is_used_if_autocast_rounds_queries_to_half_precision():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch_attention.fits_flash(torch.empty(1, 2, 3, 64))


@pytest.mark.parametrize(
    ("dtype", "masked", "heads"), [(torch.bfloat16, False, 2), (torch.bfloat16, True, 4), (torch.float32, False, 4)]
)
def test_key_heads_are_repeated_for_gpu_kernels_that_cannot_share_them(dtype, masked, heads):
    query, key, value = _drawn(0, dtype)
    keys, values = torch_attention.heads_for_kernel(query, key, value, masked=masked)
    assert keys.shape[1] == values.shape[1] == heads
    for head in range(4):
        assert torch.equal(keys[:, head * heads // 4], key[:, head // 2])
