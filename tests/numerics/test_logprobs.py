"""Log-probs: the definition in numpy equals manual values, and torch's computation in pieces equals the definition."""

import numpy as np
import pytest
import torch

from pipelinerl.numerics.logprobs import log_softmax, measure_slopes, measured, token_logprobs
from pipelinerl.numerics.torch_logprobs import _Sum, token_predictions
from pipelinerl.rng import generator
from trainer_contract.types import HeadMeasure

MEASURES = tuple(HeadMeasure)


def test_logprobs_match_manual_values():
    logits = np.log(np.array([[1.0, 3.0], [1.0, 3.0]]))
    got = np.exp(token_logprobs(logits, np.array([1, 1]), np.array([1.0, 0.5])))
    np.testing.assert_allclose(got, [3 / 4, 9 / 10])


def test_log_softmax_of_large_logits_does_not_overflow():
    got = log_softmax(np.array([[1000.0, 0.0]], dtype=np.float32), np.ones(1))
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [[0.0, -1000.0]])


@pytest.mark.parametrize("logits_at_once", [2**24, 22, 1])
@pytest.mark.parametrize("tempered", [False, True])
def test_logprobs_computed_in_pieces_agree_with_the_definition_in_value_and_gradient(logits_at_once, tempered):
    draw = generator(0, "logprobs")
    hidden, weight = draw.standard_normal((7, 4)), draw.standard_normal((11, 4))
    tokens, temperatures = draw.integers(0, 11, 7), draw.uniform(0.5, 2.0, 7) if tempered else np.ones(7)
    expected = token_logprobs(hidden @ weight.T, tokens, temperatures)

    def run(size):
        h = torch.tensor(hidden, dtype=torch.float32, requires_grad=True)
        w = torch.tensor(weight, dtype=torch.float32, requires_grad=True)
        (got,) = token_predictions(
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


def head_gradients(dtype, pieces, *, vocab=600, width=32, count=256, bias=False):
    """Return gradients of hidden states and of a linear output layer (head), computed in `dtype` in `pieces` pieces."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, width, generator=draw).bfloat16().float().requires_grad_()
    head = torch.nn.Linear(width, vocab, bias=bias)
    for each in head.parameters():
        each.data = (torch.randn(each.shape, generator=draw) * width**-0.5).bfloat16().float()
    tokens, advantages = torch.randint(0, vocab, (count,), generator=draw), torch.randn(count, generator=draw)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        at_once = vocab * -(-count // pieces)
        (got,) = token_predictions(hidden, head, tokens, None, vocab_size=vocab, logits_at_once=at_once)
    (got * advantages).sum().backward()
    return [hidden.grad, *(each.grad for each in head.parameters())]


def error(actual, expected):
    assert actual.dtype is torch.float32
    return float((actual - expected).norm() / expected.norm())


def test_bf16_gradient_of_the_output_layer_does_not_lose_precision_if_computed_in_more_pieces():
    """If gradients were not summed in fp32, the error would double from 1 piece to 128."""
    expected = head_gradients(torch.float32, 1, bias=True)
    for pieces in (1, 2, 38, 128):
        actual = head_gradients(torch.bfloat16, pieces, bias=True)
        assert max(map(error, actual, expected)) <= 0.003, pieces


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_gpu_and_cpu_methods_of_summing_bf16_gradient_products_agree(device):
    """Both ways run on a CPU here; `device` only selects the way of summing."""
    draw = torch.Generator().manual_seed(0)
    pairs = [[torch.randn(4, width, generator=draw).bfloat16() for width in (9, 5)] for _ in range(64)]
    running_sum = _Sum(torch.empty(9, 5), torch.bfloat16, device)
    for left, right in pairs:
        running_sum.add_product(left.T, right)
    assert error(running_sum.total, sum(left.T.float() @ right.float() for left, right in pairs)) <= 0.003


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bf16_gradient_of_the_output_layer_is_precise_at_qwens_vocabulary_size():
    sizes = {"vocab": 151_936, "width": 32, "count": 512}
    expected = head_gradients(torch.float32, 8, **sizes)
    actual = head_gradients(torch.bfloat16, 128, **sizes)
    assert max(map(error, actual, expected)) <= 0.003


def test_output_layer_with_bf16_weights_gets_the_same_gradient_as_with_fp32_master_weights():
    draw = torch.Generator().manual_seed(0)
    hidden, tokens = torch.randn(20, 8, generator=draw), torch.randint(0, 30, (20,), generator=draw)
    master = torch.nn.Linear(8, 30, bias=False)
    rounded = torch.nn.Linear(8, 30, bias=False)
    rounded.weight = torch.nn.Parameter(master.weight.detach().bfloat16())
    rounded.weight.grad_dtype = torch.float32
    for head in (master, rounded):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            token_predictions(hidden, head, tokens, None, vocab_size=30, logits_at_once=90).sum().backward()
    assert torch.equal(master.weight.grad, rounded.weight.grad)


def test_logprobs_of_half_precision_logits_are_computed_in_fp32():
    hidden = torch.randn(5, 8, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    (got,) = token_predictions(hidden, lambda x: x, torch.zeros(5, dtype=torch.long), None, vocab_size=8)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.log_softmax(hidden.float(), -1)[:, 0])


@pytest.mark.parametrize("measure", MEASURES)
def test_mean_logprob_and_entropy_of_the_output_distribution_and_their_derivatives_match_autograd(measure):
    logits = generator(2, "measures").standard_normal((3, 6))
    variable = torch.from_numpy(logits).requires_grad_()
    logprobs = torch.log_softmax(variable, -1)
    value = logprobs.mean(-1) if measure is HeadMeasure.MEAN_LOGPROB else -(logprobs.exp() * logprobs).sum(-1)
    value.sum().backward()
    by_hand = log_softmax(logits, np.ones(3))
    np.testing.assert_allclose(measured(measure, by_hand), value.detach().numpy(), rtol=1e-12)
    np.testing.assert_allclose(measure_slopes(measure, by_hand), variable.grad.numpy(), atol=1e-12)


@pytest.mark.parametrize("logits_at_once", [2**24, 22])
@pytest.mark.parametrize("tempered", [False, True])
def test_mean_logprob_and_entropy_computed_in_pieces_agree_with_the_definition_in_value_and_gradient(
    logits_at_once, tempered
):
    draw = generator(3, "measures")
    hidden, weight = draw.standard_normal((7, 4)), draw.standard_normal((11, 4))
    tokens, temperatures = draw.integers(0, 11, 7), draw.uniform(0.5, 2.0, 7) if tempered else np.ones(7)
    h = torch.tensor(hidden, dtype=torch.float32, requires_grad=True)
    got = token_predictions(
        h,
        lambda x: x @ torch.tensor(weight, dtype=torch.float32).T,
        torch.from_numpy(tokens),
        torch.tensor(temperatures, dtype=torch.float32) if tempered else None,
        vocab_size=11,
        measures=MEASURES,
        logits_at_once=logits_at_once,
    )
    distributions = log_softmax(hidden @ weight.T, temperatures)
    np.testing.assert_allclose(got[0].detach(), token_logprobs(hidden @ weight.T, tokens, temperatures), rtol=1e-5)
    slopes = np.zeros_like(distributions)
    for row, measure in zip(got[1:], MEASURES, strict=True):
        np.testing.assert_allclose(row.detach(), measured(measure, distributions), rtol=1e-5, atol=1e-6)
        slopes += measure_slopes(measure, distributions) / temperatures[:, None]
    got[1:].sum().backward()
    np.testing.assert_allclose(h.grad, slopes @ weight, rtol=1e-4, atol=1e-5)


def test_computing_mean_logprob_and_entropy_does_not_change_the_bits_of_the_tokens_logprobs():
    """If the bits differed, the ratio of the probabilities in gradient and forward pass would not start at 1."""
    hidden, tokens = torch.randn(9, 16, generator=torch.Generator().manual_seed(1)), torch.arange(9)
    alone, with_entropy = (
        token_predictions(hidden, lambda x: x, tokens, None, vocab_size=16, measures=given)[0]
        for given in ((), MEASURES)
    )
    assert torch.equal(alone, with_entropy)
