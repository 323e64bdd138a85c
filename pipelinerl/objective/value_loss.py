"""The critic's objective: squared error to the returns, clipped around the values from the start of the step.

    L = Σ_t w_t · ½·max( (V_t − R_t)², (clip(V_t, V_old,t − ε, V_old,t + ε) − R_t)² )

This is the loss of PPO's reference implementation (Engstrom et al. 2020, "Implementation Matters", Eq. 3). Because of
the maximum, a value that has already moved by more than ε towards its return gets no gradient for the rest of the step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipelinerl.arrays import Array, namespace
from pipelinerl.objective.tokens import column_of
from trainer_contract.types import Columns, Float32, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLoss:
    """Objective for a value head; satisfies `trainer_contract.types.Objective`.

    `clip` is ε in reward units; inf disables clipping. The loss reads the columns [T] `loss_mask`, `weights`, `values`
    and `returns`, which may hold any value outside the mask, even NaN.
    """

    clip: float = 0.2

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"returns"} if math.isinf(self.clip) else {"values", "returns"})

    def evaluate(self, values: Array, columns: Columns, /) -> Array:
        xp = namespace(values)
        error, clipped = self._errors(values, columns)
        square = xp.where(error * error >= clipped * clipped, error * error, clipped * clipped)
        return (0.5 * _inside(column_of(columns, "weights"), columns) * square).sum()

    def prediction_gradient(self, values: Array, columns: Columns, /) -> Array:
        """Return d loss / d values, [T]: w·(V − R), or 0 where the clipped error is the maximum (constant in V)."""
        xp = namespace(values)
        error, clipped = self._errors(values, columns)
        slope = xp.where(error * error >= clipped * clipped, error, xp.zeros_like(error))
        return _inside(column_of(columns, "weights"), columns) * slope

    def _errors(self, values: Array, columns: Columns) -> tuple[Array, Array]:
        current, returns = _inside(values, columns), _inside(column_of(columns, "returns"), columns)
        if math.isinf(self.clip):
            return current - returns, current - returns
        old = _inside(column_of(columns, "values"), columns)
        clipped = namespace(values).clip(current, old - self.clip, old + self.clip)
        return current - returns, clipped - returns


def _inside(column: Array, columns: Columns) -> Array:
    xp = namespace(column)
    return xp.where(column_of(columns, "loss_mask"), column, xp.zeros_like(column))


def value_statistics(micro_batches: Sequence[MicroBatch], values: Sequence[Float32]) -> dict[str, float]:
    """Return metrics of a critic's step from the values used in its loss; {} if no token trained.

    `value_explained` is 1 − Var(R − V)/Var(R). It is 1 for a perfect critic, and 0 for a critic that predicts only the
    mean or if returns do not vary. Below 0, the critic is worse than predicting the mean.
    """
    parts: Mapping[str, list[np.ndarray]] = {"values": [], "returns": []}
    for batch, predicted in zip(micro_batches, values, strict=True):
        if batch.returns is not None:
            parts["values"].append(predicted[batch.loss_mask])
            parts["returns"].append(batch.returns[batch.loss_mask])
    if not sum(part.size for part in parts["values"]):
        return {}
    value, wanted = (np.concatenate(parts[name]).astype(np.float64) for name in ("values", "returns"))
    spread = wanted.var()
    return {
        "value_mean": float(value.mean()),
        "return_mean": float(wanted.mean()),
        "value_error": float(np.sqrt(((value - wanted) ** 2).mean())),
        "value_explained": float(1 - (wanted - value).var() / spread) if spread > 0 else 0.0,
    }
