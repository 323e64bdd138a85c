"""Log-probs: the definition by hand, and torch's piecewise version against it."""

import numpy as np
import pytest
import torch

from pipelinerl.numerics.logprobs import log_softmax, token_logprobs
from pipelinerl.numerics.torch_logprobs import token_logprobs as torch_token_logprobs
from pipelinerl.rng import generator


def test_by_hand():
    logits = np.log(np.array([[1.0, 3.0], [1.0, 3.0]]))
    got = np.exp(token_logprobs(logits, np.array([1, 1]), np.array([1.0, 0.5])))
    np.testing.assert_allclose(got, [3 / 4, 9 / 10])


def test_large_logits_do_not_overflow():
    got = log_softmax(np.array([[1000.0, 0.0]], dtype=np.float32), np.ones(1))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [[0.0, -1000.0]])


@pytest.mark.parametrize("logits_at_once", [2**24, 22, 1])
@pytest.mark.parametrize("tempered", [False, True])
def test_pieces_agree_with_the_definition_in_value_and_gradient(logits_at_once, tempered):
    draw = generator(0, "logprobs")
    hidden, weight = draw.standard_normal((7, 4)), draw.standard_normal((11, 4))
    tokens, temperatures = draw.integers(0, 11, 7), draw.uniform(0.5, 2.0, 7) if tempered else np.ones(7)
    expected = token_logprobs(hidden @ weight.T, tokens, temperatures)

    def run(size):
        h = torch.tensor(hidden, dtype=torch.float32, requires_grad=True)
        w = torch.tensor(weight, dtype=torch.float32, requires_grad=True)
        got = torch_token_logprobs(
            h,
            lambda x: x @ w.T,
            torch.from_numpy(tokens),
            torch.tensor(temperatures, dtype=torch.float32) if tempered else None,
            vocab_size=11,
            logits_at_once=size,
        )
        (got * torch.arange(7)).sum().backward()
        return got.detach(), h.grad, w.grad

    got, h_grad, w_grad = run(logits_at_once)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5)
    _, h_whole, w_whole = run(2**24)
    torch.testing.assert_close(h_grad, h_whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(w_grad, w_whole, rtol=1e-5, atol=1e-5)


def test_half_precision_logits_are_normalised_in_fp32():
    hidden = torch.randn(5, 8, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    got = torch_token_logprobs(hidden, lambda x: x, torch.zeros(5, dtype=torch.long), None, vocab_size=8)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.log_softmax(hidden.float(), -1)[:, 0])
