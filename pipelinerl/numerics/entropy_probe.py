"""`EntropyProbe`: an objective whose value is the mean entropy of the policy's distributions, and whose gradient is 0.

Entropy over the whole vocabulary is a `HeadMeasure`, which a trainer computes for the objective that needs it: so every
trainer can tell it, and none has to learn a verb for it. Next to the surprisal of the sampled tokens it shows what the
sampler's own choice hides: a policy that is sure, or a sampler that is cold.

Here, and not beside who asks for it, since a trainer's other processes make it by its name (`trainers.ranks.commands`),
and take names of this folder alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import numpy as np

from pipelinerl.arrays import Array, namespace, on_host, stop_gradient
from trainer_contract.types import Columns, Float32, HeadMeasure


@final
@dataclass(frozen=True, slots=True)
class EntropyProbe:
    """Satisfies `trainer_contract.types.Objective`, and `MeasuringObjective`.

    Attributes:
        seen: the entropies over the loss mask of each micro-batch that was evaluated in this process, f32 [N] each. A
            trainer that compiles the objective, or evaluates it elsewhere, leaves none. All probes are one program.
    """

    seen: list[Float32] = field(default_factory=list, init=False, compare=False)

    @property
    def needs(self) -> frozenset[str]:
        """The entropies."""
        return frozenset({HeadMeasure.ENTROPY})

    def evaluate(self, predictions: Array, columns: Columns) -> Array:
        """Mean entropy over the loss mask in nats, a scalar that depends on the predictions and moves with none."""
        xp, mask = namespace(predictions), columns["loss_mask"]
        known = on_host(columns[HeadMeasure.ENTROPY])
        if known is not None:
            self.seen.append(known[on_host(mask)].astype(np.float32))
        entropies = stop_gradient(xp.where(mask, columns[HeadMeasure.ENTROPY], 0.0))
        return entropies.sum() / mask.sum() + 0.0 * xp.where(mask, predictions, 0.0).sum()

    def prediction_gradient(self, predictions: Array, columns: Columns) -> Array:
        """0, [T]."""
        return namespace(predictions).zeros_like(predictions)

    def measure_gradients(self, predictions: Array, columns: Columns) -> Mapping[HeadMeasure, Array]:
        """0, [T]."""
        return {HeadMeasure.ENTROPY: namespace(predictions).zeros_like(predictions)}
