"""`EntropyProbe`: an objective whose value is the mean entropy of the policy's distributions, and whose gradient is 0.

Every trainer computes the entropy over the vocabulary if the objective lists it in `needs` (`HeadMeasure`). An
objective can therefore measure entropy with any trainer. Low surprisal of the sampled tokens can come from a confident
policy or from a low sampling temperature; entropy distinguishes the two.

The class lies in this package because a trainer's other processes load objectives by name, and accept only names from
a few packages, this one included (`trainers.ranks.commands`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from pipelinerl.arrays import Array, namespace, on_host, stop_gradient
from trainer_contract.types import Columns, Float32, HeadMeasure


@dataclass(frozen=True, slots=True)
class EntropyProbe:
    """Measures entropy; `seen` gets that of each micro-batch's tokens, f32 [N], if evaluated in this process."""

    seen: list[Float32] = field(default_factory=list, init=False, compare=False)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({HeadMeasure.ENTROPY})

    def evaluate(self, predictions: Array, columns: Columns) -> Array:
        xp, mask = namespace(predictions), columns["loss_mask"]
        known = on_host(columns[HeadMeasure.ENTROPY])
        if known is not None:
            self.seen.append(known[on_host(mask)].astype(np.float32))
        entropies = stop_gradient(xp.where(mask, columns[HeadMeasure.ENTROPY], 0.0))
        return entropies.sum() / mask.sum() + 0.0 * xp.where(mask, predictions, 0.0).sum()

    def prediction_gradient(self, predictions: Array, columns: Columns) -> Array:
        return namespace(predictions).zeros_like(predictions)

    def measure_gradients(self, predictions: Array, columns: Columns) -> Mapping[HeadMeasure, Array]:
        return {HeadMeasure.ENTROPY: namespace(predictions).zeros_like(predictions)}
