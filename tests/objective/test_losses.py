"""The public loss functions: numpy, torch and JAX agree with each other and with the training gradient."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from pipelinerl.errors import ColumnError, UserError
from pipelinerl.objective import ScoredRollout, policy_loss, rollouts_loss
from pipelinerl.rng import generator

REWARDS, GROUPS = [1.0, 0.0, 0.5, 0.25], [3, 3, 1, 1]
MASK = np.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]], bool)


def batch():
    draw = generator(1, "losses")
    names = ("logprobs", "behavior_logprobs", "old_logprobs", "ref_logprobs", "values", "vocab_mean_logprobs")
    return {name: np.where(MASK, -draw.exponential(1.0, MASK.shape), np.nan) for name in names}


def rollouts():
    table = batch()

    def column(name, row):
        return tuple(table[name][row][MASK[row]].tolist())

    return [
        ScoredRollout(
            tokens=("x",) * int(MASK[row].sum()),
            reward=REWARDS[row],
            group=GROUPS[row],
            **{name: column(name, row) for name in table if name != "vocab_mean_logprobs"},
        )
        for row in range(len(MASK))
    ]


@pytest.mark.parametrize("name", ["grpo", "ppo", "gspo", "agarwal", "dr_grpo", "ppo_tis", "grpo_kl"])
def test_policy_loss_in_torch_and_jax_agrees_with_numpy(name):
    table = batch()
    logprobs = table.pop("logprobs")
    given = {"rewards": REWARDS, "groups": GROUPS, "mask": MASK, "max_tokens": 8}
    wanted = policy_loss(name, logprobs, **given, **table)
    variable = torch.from_numpy(logprobs).requires_grad_()
    tensors = {column: torch.from_numpy(array) for column, array in table.items()}
    result = policy_loss(name, variable, **given, **tensors)
    result.loss.backward()
    assert variable.grad is not None and result.loss.item() == pytest.approx(float(wanted.loss), abs=1e-12)
    for gradient in (result.gradient, variable.grad):
        np.testing.assert_allclose(gradient.numpy(), wanted.gradient, rtol=0, atol=1e-12)
    with jax.enable_x64(True):
        arrays = {column: jnp.asarray(array) for column, array in table.items()}
        loss, slope = jax.value_and_grad(lambda now: policy_loss(name, now, **given, **arrays).loss)(
            jnp.asarray(logprobs)
        )
        closed = policy_loss(name, jnp.asarray(logprobs), **given, **arrays).gradient
    assert float(loss) == pytest.approx(float(wanted.loss), abs=1e-12)
    for gradient in (slope, closed):
        np.testing.assert_allclose(gradient, wanted.gradient, rtol=0, atol=1e-9)


def test_loss_of_a_list_of_rollouts_equals_the_loss_of_the_same_rollouts_as_arrays():
    table = batch()
    logprobs = table.pop("logprobs")
    by_arrays = policy_loss("ppo_tis", logprobs, rewards=REWARDS, groups=GROUPS, mask=MASK, **table)
    by_rollouts = rollouts_loss("ppo_tis", rollouts())
    assert by_rollouts.loss == by_arrays.loss
    np.testing.assert_array_equal(by_rollouts.gradient, by_arrays.gradient)


def test_rollout_that_could_not_be_judged_has_zero_policy_loss_gradient():
    table = batch()
    logprobs = table.pop("logprobs")
    rewards = [*REWARDS[:3], float("nan")]
    judged = [True, True, True, False]
    result = policy_loss("grpo", logprobs, rewards=rewards, groups=GROUPS, mask=MASK, judged=judged, **table)
    assert np.isfinite(result.loss) and (result.gradient[3] == 0).all() and (result.gradient[0] != 0).any()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"behavior_logprobs": None}, "reads the column behavior_logprobs, .* it is computed by the sampler"),
        ({"objective": "ppo"}, "reads the column values, .* it is computed by a forward pass of a critic"),
        ({"objective": "dr_grpo"}, "agg.length is max_tokens"),
        ({"objective": "gpro"}, "objective.preset must be one of"),
        ({"objective": 3}, "objective must be a preset's name, a table or a PolicyObjective, got 3"),
        ({"rewards": [1.0]}, r"rewards must have one entry for each of the 4 rollouts, got \(1,\)"),
        ({"old_logprob": np.zeros((4, 3))}, "old_logprob is no column of an objective; expected any of behavior_log"),
        ({"old_logprobs": np.zeros(3)}, r"old_logprobs must have the shape of logprobs, \(4, 3\), got \(3,\)"),
        ({"logprobs": np.zeros(3)}, r"logprobs must be \[B, T\], rollouts by tokens, got the shape \(3,\)"),
    ],
)
def test_policy_loss_rejects_invalid_input_with_a_reason(changed, sentence):
    table = batch()
    given = {name: table[name] for name in ("logprobs", "behavior_logprobs")}
    given |= {"objective": "grpo", "rewards": REWARDS, "mask": MASK, **changed}
    given = {name: value for name, value in given.items() if value is not None}
    with pytest.raises(ColumnError if "reads the column" in sentence else UserError, match=sentence):
        policy_loss(given.pop("objective"), given.pop("logprobs"), **given)


def test_policy_loss_example_in_the_docs_runs_without_heavy_libraries():
    text = (Path(__file__).parents[2] / "docs" / "understand" / "objectives.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    heavy = "import sys; print(sorted({'torch', 'jax', 'transformers', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", f"{example}\n{heavy}"], capture_output=True, text=True, timeout=60, check=True
    )
    *printed, loaded = done.stdout.strip().splitlines()
    assert loaded == "[]"
    assert "nan" not in " ".join(printed) and float(printed[0].split()[0]) != 0.0
