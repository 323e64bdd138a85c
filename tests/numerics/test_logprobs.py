"""Log-probs: the definition against manual values, and torch's piecewise version against the definition."""

import numpy as np
import pytest
import torch

from pipelinerl.numerics.logprobs import log_softmax, measure_slopes, measured, token_logprobs
from pipelinerl.numerics.torch_logprobs import token_predictions
from pipelinerl.rng import generator
from trainer_contract.types import HeadMeasure

MEASURES = tuple(HeadMeasure)


def test_logprobs_match_manual_values():
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


def test_half_precision_logits_are_normalised_in_fp32():
    hidden = torch.randn(5, 8, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    (got,) = token_predictions(hidden, lambda x: x, torch.zeros(5, dtype=torch.long), None, vocab_size=8)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, torch.log_softmax(hidden.float(), -1)[:, 0])


def test_measures_match_manual_values():
    logprobs = np.log(np.array([[0.25, 0.75]]))
    assert measured(HeadMeasure.MEAN_LOGPROB, logprobs)[0] == pytest.approx((np.log(0.25) + np.log(0.75)) / 2)
    assert measured(HeadMeasure.ENTROPY, logprobs)[0] == pytest.approx(-0.25 * np.log(0.25) - 0.75 * np.log(0.75))


@pytest.mark.parametrize("measure", MEASURES)
def test_measure_slopes_are_its_derivatives(measure):
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
def test_measures_agree_with_the_definition_in_value_and_gradient(logits_at_once, tempered):
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


def test_measures_do_not_change_the_bits_of_logprobs():
    """Otherwise the ratio between the gradient pass and the forward pass would not start at 1."""
    hidden, tokens = torch.randn(9, 16, generator=torch.Generator().manual_seed(1)), torch.arange(9)
    alone, beside = (
        token_predictions(hidden, lambda x: x, tokens, None, vocab_size=16, measures=given)[0]
        for given in ((), MEASURES)
    )
    assert torch.equal(alone, beside)
