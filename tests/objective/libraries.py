"""Evaluate an objective in numpy, torch or JAX, in float64; losses and gradients are returned as numpy arrays."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from pipelinerl.objective.objective import PolicyObjective


class Evaluated(NamedTuple):
    """A loss and its gradient with respect to the log-probs."""

    loss: float
    gradient: np.ndarray


def in_numpy(objective: PolicyObjective, logprobs: np.ndarray, columns: dict[str, Any]) -> Evaluated:
    """Evaluate the objective in numpy, with its closed-form gradient."""
    return Evaluated(float(objective.evaluate(logprobs, columns)), objective.prediction_gradient(logprobs, columns))


def in_torch(objective: PolicyObjective, logprobs: np.ndarray, columns: dict[str, Any]) -> Evaluated:
    """Evaluate the objective in torch, with the gradient from autograd."""
    variable = torch.from_numpy(logprobs).requires_grad_()
    loss = objective.evaluate(variable, as_torch(columns))
    loss.backward()
    assert variable.grad is not None
    return Evaluated(loss.item(), variable.grad.numpy())


def in_jax(objective: PolicyObjective, logprobs: np.ndarray, columns: dict[str, Any]) -> Evaluated:
    """Evaluate the objective in JAX, compiled as in a trainer, with the gradient from automatic differentiation."""
    segments = columns["num_segments"]
    with jax.enable_x64(True):
        arrays = {name: jnp.asarray(column) for name, column in columns.items() if isinstance(column, np.ndarray)}

        def loss_of(variable: Any, given: Any) -> Any:
            return objective.evaluate(variable, given | {"num_segments": segments})

        loss, gradient = jax.jit(jax.value_and_grad(loss_of))(jnp.asarray(logprobs), arrays)
        assert gradient.dtype == jnp.float64
        return Evaluated(float(loss), np.asarray(gradient))


def as_torch(columns: dict[str, Any]) -> dict[str, Any]:
    """Convert numpy columns to torch tensors."""
    return {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in columns.items()}


LIBRARIES = {"numpy": in_numpy, "torch": in_torch, "jax": in_jax}
