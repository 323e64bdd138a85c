"""Batch-invariant layers give the same bits in every batch, and the values and gradients of ordinary layers."""

import pytest
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from pipelinerl.numerics import torch_batch_invariant

DTYPES = (torch.float32, torch.bfloat16)
HEADS, KEY_HEADS, WIDTH, SCALE = 4, 2, 16, 0.25


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def conversation(length, dtype=torch.float32, *, seed=0):
    """Return query [1, HEADS, T, WIDTH], key and value; a longer sequence of the same seed begins with the shorter."""
    whole = [drawn(1, 300, heads, WIDTH, dtype=dtype, seed=seed + n) for n, heads in enumerate((HEADS, 2, 2))]
    return tuple(each[:, :length].transpose(1, 2) for each in whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "outer"), [(64, 57), (128, 64), (576, 96)])
def test_batch_invariant_matrix_product_of_a_row_has_the_same_bits_for_any_number_of_rows(dtype, inner, outer):
    x, weight, bias = drawn(700, inner, dtype=dtype), drawn(outer, inner, dtype=dtype), drawn(outer, dtype=dtype)
    whole = torch_batch_invariant.product(x, weight, bias)
    torch.testing.assert_close(whole, linear(x, weight, bias), rtol=1e-2, atol=1e-2)
    for rows in (1, 2, 3, 8, 15, 16, 31, 32, 33, 100, 512):
        assert torch.equal(torch_batch_invariant.product(x[:rows], weight, bias), whole[:rows]), rows


@pytest.mark.parametrize("window", [None, 20, 100])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_batch_invariant_attention_equals_the_softmax_of_masked_scores(window, softcap):
    query, key, value = conversation(150)
    got = torch_batch_invariant.attend(
        query, key, value, torch.arange(150)[None], window=window, scale=SCALE, softcap=softcap
    )
    key, value = key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1)
    scores = query @ key.transpose(2, 3) * SCALE
    scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
    distance = torch.arange(150)[:, None] - torch.arange(150)
    hidden = (distance < 0) | (distance >= (window or 150))
    expected = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ value
    torch.testing.assert_close(got, expected.transpose(1, 2), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 20])
def test_batch_invariant_attention_of_a_token_has_the_same_bits_in_decode_prefill_and_training(dtype, window):
    length = 200
    query, key, value = conversation(length, dtype)
    positions = torch.arange(length)[None]
    whole = torch_batch_invariant.attend(query, key, value, positions, window=window, scale=SCALE)[0]
    others = conversation(length, dtype, seed=7)
    pair = [torch.cat(each) for each in zip((query, key, value), others, strict=True)]
    assert torch.equal(torch_batch_invariant.attend(*pair, positions, window=window, scale=SCALE)[0], whole)
    for at in (0, 1, 63, 64, 130, 199):
        short = (each[:, :, : at + 1] for each in (key, value))  # as in a decode step
        (alone,) = torch_batch_invariant.attend(
            query[:, :, at : at + 1], *short, torch.tensor([[at]]), window=window, scale=SCALE
        )
        assert torch.equal(alone[0], whole[at]), at
    late = torch_batch_invariant.attend(query[:, :, 96:], key, value, positions[:, 96:], window=window, scale=SCALE)[0]
    assert torch.equal(late, whole[96:]), "a prefill that continues a cached beginning"


def test_gradients_of_batch_invariant_attention_equal_those_of_torchs_attention():
    inputs = [each.clone().requires_grad_() for each in conversation(90)]
    slope = drawn(1, 90, HEADS, WIDTH, seed=9)
    torch_batch_invariant.attend(*inputs, torch.arange(90)[None], window=None, scale=SCALE).backward(slope)
    plain = [each.detach().clone().requires_grad_() for each in inputs]
    out = scaled_dot_product_attention(*plain, is_causal=True, scale=SCALE, enable_gqa=True)
    out.transpose(1, 2).backward(slope)
    for ours, theirs in zip(inputs, plain, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-5)


def test_probe_for_batch_invariance_detects_results_that_depend_on_the_batch():
    assert torch_batch_invariant.probed(lambda count: 1.0)
    assert not torch_batch_invariant.probed(lambda count: 1.0 if count < 17 else 1.0 + 2**-52)
