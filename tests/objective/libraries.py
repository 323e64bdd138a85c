"""The same objective in three array libraries, in float64: values and gradients of one micro-batch as numpy."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from pipelinerl.objective.objective import PolicyObjective


class Evaluated(NamedTuple):
    """A loss and its gradient by the log-probs."""

    loss: float
    gradient: np.ndarray


def in_numpy(objective: PolicyObjective, logprobs: np.ndarray, columns: dict[str, Any]) -> Evaluated:
    """The gradient in closed form."""
    return Evaluated(float(objective.evaluate(logprobs, columns)), objective.prediction_gradient(logprobs, columns))


def in_torch(objective: PolicyObjective, logprobs: np.ndarray, columns: dict[str, Any]) -> Evaluated:
    """By autograd."""
    variable = torch.from_numpy(logprobs).requires_grad_()
    loss = objective.evaluate(variable, as_torch(columns))
    loss.backward()
    assert variable.grad is not None
    return Evaluated(loss.item(), variable.grad.numpy())


def in_jax(objective: PolicyObjective, logprobs: np.ndarray, columns: dict[str, Any]) -> Evaluated:
    """By automatic differentiation, compiled, as a trainer does it."""
    segments = columns["num_segments"]
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(column) for name, column in columns.items() if isinstance(column, np.ndarray)}

        def loss_of(variable: Any, given: Any) -> Any:
            return objective.evaluate(variable, given | {"num_segments": segments})

        loss, gradient = jax.jit(jax.value_and_grad(loss_of))(jnp.asarray(logprobs), arrays)
        assert gradient.dtype == jnp.float64
        return Evaluated(float(loss), np.asarray(gradient))


def as_torch(columns: dict[str, Any]) -> dict[str, Any]:
    """Arrays as tensors."""
    return {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in columns.items()}


LIBRARIES = {"numpy": in_numpy, "torch": in_torch, "jax": in_jax}
