"""`EntropyProbe`: an objective whose value is the mean entropy of the policy's distributions, and whose gradient is 0.

Entropy over the whole vocabulary is a `HeadMeasure`, which a trainer computes for the objective that needs it: so every
trainer can tell it, and none has to learn a verb for it. Next to the surprisal of the sampled tokens it shows what the
sampler's own choice hides: a policy that is sure, or a sampler that is cold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from pipelinerl.arrays import Array, namespace, stop_gradient
from trainer_contract.types import Columns, HeadMeasure


@final
@dataclass(frozen=True, slots=True)
class EntropyProbe:
    """Satisfies `trainer_contract.types.Objective`, and `MeasuringObjective`."""

    @property
    def needs(self) -> frozenset[str]:
        """The entropies."""
        return frozenset({HeadMeasure.ENTROPY})

    def evaluate(self, predictions: Array, columns: Columns) -> Array:
        """Mean entropy over the loss mask in nats, a scalar that depends on the predictions and moves with none."""
        xp, mask = namespace(predictions), columns["loss_mask"]
        entropies = stop_gradient(xp.where(mask, columns[HeadMeasure.ENTROPY], 0.0))
        return entropies.sum() / mask.sum() + 0.0 * xp.where(mask, predictions, 0.0).sum()

    def prediction_gradient(self, predictions: Array, columns: Columns) -> Array:
        """0, [T]."""
        return namespace(predictions).zeros_like(predictions)

    def measure_gradients(self, predictions: Array, columns: Columns) -> Mapping[HeadMeasure, Array]:
        """0, [T]."""
        return {HeadMeasure.ENTROPY: namespace(predictions).zeros_like(predictions)}
