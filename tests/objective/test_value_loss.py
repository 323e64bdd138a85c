"""The critic's loss equals loops over its formula, autograd and hand-computed numbers."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from pipelinerl import rng
from pipelinerl.objective.value_loss import ValueLoss, value_statistics
from trainer_contract.conformance.probes import pack


def columns(seed, tokens=40):
    draw = rng.generator(seed, "value_loss")
    inside = draw.random(tokens) < 0.7
    return draw.normal(size=tokens), {
        "loss_mask": inside,
        "weights": np.where(inside, draw.random(tokens), 0.0),
        "values": draw.normal(scale=0.3, size=tokens),
        "returns": np.where(inside, draw.normal(size=tokens), np.nan),
    }


def loss_by_loops(values, given, clip):
    total = 0.0
    for t, value in enumerate(values):
        if given["loss_mask"][t]:
            old, wanted = given["values"][t], given["returns"][t]
            held = min(max(value, old - clip), old + clip)
            total += given["weights"][t] * 0.5 * max((value - wanted) ** 2, (held - wanted) ** 2)
    return total


@pytest.mark.parametrize("clip", [0.2, 0.5, math.inf])
@pytest.mark.parametrize("seed", range(3))
def test_value_loss_equals_a_loop_over_its_formula_and_its_gradient_equals_autograd(seed, clip):
    values, given = columns(seed)
    loss = ValueLoss(clip=clip)
    assert loss.needs == {"returns"} | (set() if math.isinf(clip) else {"values"})
    assert loss.evaluate(values, given) == pytest.approx(loss_by_loops(values, given, clip), rel=1e-12)
    variable = torch.tensor(values, requires_grad=True)
    tensors = {name: torch.from_numpy(column) for name, column in given.items()}
    total = loss.evaluate(variable, tensors)
    total.backward()
    assert total.item() == pytest.approx(loss_by_loops(values, given, clip), rel=1e-12)
    assert variable.grad is not None
    closed = loss.prediction_gradient(values, given)
    np.testing.assert_allclose(closed, variable.grad.numpy(), rtol=0, atol=1e-12)
    stopped = given["loss_mask"] & (closed == 0)
    assert stopped.any() != math.isinf(clip), "some value must be clipped"


def test_value_clipped_after_moving_towards_its_return_has_zero_gradient():
    given = {
        "loss_mask": np.array([True, True]),
        "weights": np.ones(2),
        "values": np.zeros(2),
        "returns": np.array([1.0, -1.0]),
    }
    assert ValueLoss(clip=0.2).prediction_gradient(np.array([0.5, 0.5]), given).tolist() == [0.0, 1.5]


def test_value_metrics_match_hand_computed_numbers():
    batch = pack([[1, 2, 3], [4, 5]], prompt=1)
    returns = np.array([9, 1, 3, 9, 2], np.float32)
    values = np.array([0, 1, 2, 0, 3], np.float32)
    figures = value_statistics([replace(batch, returns=returns)], [values])
    assert figures == {
        "value_mean": 2.0,
        "return_mean": 2.0,
        "value_error": pytest.approx(math.sqrt(2 / 3)),
        "value_explained": pytest.approx(0.0),
    }
    assert value_statistics([batch], [values]) == {}
