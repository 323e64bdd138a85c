"""Excluded tokens contribute 0, never NaN, to the loss, even if their ratio overflows fp32 or a value is invalid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from pipelinerl.objective.catalogue import PRESETS
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.presets import resolve
from pipelinerl.objective.value_loss import ValueLoss
from tests.objective.libraries import Evaluated, as_torch, in_numpy

COLUMNS = ("behavior_logprobs", "old_logprobs", "ref_logprobs", "vocab_mean_logprobs")
FAR = 100.0
"""e^100 is infinite in fp32."""


def in_torch_fp32(objective, logprobs, columns):
    variable = torch.from_numpy(logprobs.copy()).requires_grad_()
    loss = objective.evaluate(variable, as_torch(columns))
    loss.backward()
    assert variable.grad is not None
    return Evaluated(loss.item(), variable.grad.numpy())


def in_jax_fp32(objective, logprobs, columns):
    arrays = {name: jnp.asarray(column) for name, column in columns.items()}
    loss, gradient = jax.value_and_grad(objective.evaluate)(jnp.asarray(logprobs), arrays)
    return Evaluated(float(loss), np.asarray(gradient))


LIBRARIES: dict[str, Callable[[PolicyObjective, np.ndarray, dict[str, Any]], Evaluated]] = {
    "numpy": in_numpy,
    "torch": in_torch_fp32,
    "jax": in_jax_fp32,
}


def batch(**changed):
    """Return the log-probs and columns of two rollouts of two tokens in fp32; `changed` replaces whole columns."""
    plain = {name: [-1.0, -1.1, -1.2, -0.9] for name in ("logprobs", *COLUMNS)}
    plain |= {"advantages": [0.5, 0.7, -0.4, -0.6], "weights": [0.25] * 4}
    table = {name: np.array(changed.get(name, column), np.float32) for name, column in plain.items()}
    given = {name: column for name, column in table.items() if name != "logprobs"}
    given |= {"loss_mask": np.ones(4, bool), "segment_ids": np.array([0, 0, 1, 1]), "num_segments": 2}
    return table["logprobs"], given


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "name", ["grpo", "dapo", "gspo", "ppo", "ppo_tis", "decoupled_ppo", "ppo_vanilla_is", "ppo_is", "sapo", "luspo"]
)
def test_clipped_token_has_zero_gradient_even_if_its_ratio_overflows(name, library):
    """With A > 0 and r = e^100, PPO's min takes the clipped side, whose gradient is 0."""
    objective = resolve(name)
    over = "old_logprobs" if "old_logprobs" in objective.needs else "behavior_logprobs"
    logprobs, columns = batch(**{over: [-1.0, -1.1 - FAR, -1.2, -0.9]})
    if over == "old_logprobs":
        columns["behavior_logprobs"] = columns["old_logprobs"]
    with np.errstate(over="ignore"):
        loss, gradient = LIBRARIES[library](objective, logprobs, columns)
    assert np.isfinite(loss) and np.isfinite(gradient).all() and gradient[1] == 0.0
    assert gradient[2] != 0.0, "other tokens have gradients"


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "name",
    ["grpo", "pipelinerl", "reinforce_token", "ppo_vanilla_is", "grpo_kl", "gspo", "cfpo", "sapo", "dppo_tv", "vespo"],
)
def test_overflowing_ratio_of_a_token_with_zero_advantage_leaves_the_loss_finite(name, library):
    logprobs, columns = batch(behavior_logprobs=[-1.0, -1.1, -1.2, -0.9 - FAR], advantages=[0.5, 0.7, 0.0, 0.0])
    objective = resolve(name, max_tokens=8)
    with np.errstate(over="ignore"):
        loss, gradient = LIBRARIES[library](objective, logprobs, columns)
    assert np.isfinite(loss) and np.isfinite(gradient).all() and gradient[0] != 0.0


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("name", "token", "changed"),
    [
        # π_old/μ = e^100 > 5 excludes the token, so π_θ/π_old = e^100 with A < 0 must not matter.
        ("decoupled_ppo", 3, {"old_logprobs": [-1.0, -1.1, -1.2, -101], "behavior_logprobs": [-1.0, -1.1, -1.2, -201]}),
        # The token is clipped, so its infinite importance weight must not matter.
        ("ppo_vanilla_is", 1, {"logprobs": [-1.0, -0.1, -1.2, -0.9], "behavior_logprobs": [-1.0, -101, -1.2, -0.9]}),
        # A < 0 is not clipped above; A > 0 of CFPO is pulled back to 1 without bound: infinite, not NaN.
        ("grpo", None, {"behavior_logprobs": [-1.0, -1.1, -1.2, -0.9 - FAR]}),
        ("cfpo", None, {"behavior_logprobs": [-1.0, -1.1 - FAR, -1.2, -0.9]}),
    ],
)
def test_overflowing_ratio_matters_only_at_a_token_that_is_neither_excluded_nor_clipped(name, token, changed, library):
    logprobs, columns = batch(**changed)
    with np.errstate(over="ignore"):
        loss, gradient = LIBRARIES[library](resolve(name), logprobs, columns)
    if token is None:
        assert loss == np.inf
    else:
        assert np.isfinite(loss) and gradient[token] == 0.0 and gradient[2] != 0.0


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 1e30, -1e30])
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", PRESETS)
def test_invalid_values_outside_the_loss_mask_are_ignored(name, library, garbage):
    """All columns, including advantages and weights, have invalid values together, and numpy gives no warning."""
    objective = resolve(name, max_tokens=8)
    logprobs, columns = batch()
    columns["loss_mask"] = np.array([True, False, True, False])
    chosen = {"kl_coefficients": np.ones(4, np.float32)} if "kl_coefficients" in objective.needs else {}
    columns |= chosen
    wanted = LIBRARIES[library](objective, logprobs, columns)
    for name_of_column in (*COLUMNS, *chosen, "advantages", "weights"):
        columns[name_of_column] = np.where(columns["loss_mask"], columns[name_of_column], np.float32(garbage))
    spoiled = np.where(columns["loss_mask"], logprobs, np.float32(garbage))
    got = LIBRARIES[library](objective, spoiled, columns)
    assert got.loss == wanted.loss
    np.testing.assert_array_equal(got.gradient, wanted.gradient)
    for measure, slope in objective.measure_gradients(spoiled, columns).items():
        assert np.isfinite(slope).all() and (slope[~columns["loss_mask"]] == 0).all(), measure


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("library", LIBRARIES)
def test_invalid_values_outside_the_critics_loss_mask_are_ignored(library, garbage):
    mask = np.array([True, False])
    columns = {"loss_mask": mask}
    for name, number in {"weights": 1.0, "values": 0.1, "returns": 0.7}.items():
        columns[name] = np.where(mask, np.float32(number), np.float32(garbage))
    values, loss = np.where(mask, np.float32(0.2), np.float32(garbage)), ValueLoss()
    closed = loss.prediction_gradient(values, columns)
    got = LIBRARIES[library](loss, values, columns)
    np.testing.assert_array_equal(got.gradient, closed)
    assert closed[0] == pytest.approx(-0.5) and closed[1] == 0.0 and np.isfinite(got.loss)
