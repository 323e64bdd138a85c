"""Gradient checks for adapters: gathered weights are merged, so they do not reveal the gradient; the loss does.

With AdamW's eps = 1 and a gradient far below 1, the first step is lr·g, and the loss falls by lr·|g|². With the
gradient clipped to the norm c, the loss falls by lr·c·|g|.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from trainer_contract.conformance.probes import TrainerUnderTest, require, require_equal, started
from trainer_contract.types import MicroBatch, Objective

#: The gradient norm that the objective's weights are scaled to, far below eps.
_FAINT: Final = 0.01
#: Relative fall of the loss: large enough for fp32, small enough to be proportional to the step.
_SHARE: Final = 1e-3


def loss_decrease_matches_the_gradient(subject: TrainerUnderTest, batch: MicroBatch, objective: Objective) -> None:
    """A small step reduces the loss by the rate times the square of the reported norm."""
    faint, norm, rate = _fainter(subject, batch, objective)
    fall = _fall(subject, faint, objective, rate)
    expected = rate * norm**2
    require_equal(fall, expected, 0.1 * expected, "the fall of the loss after a small step")


def loss_decrease_is_clipped(subject: TrainerUnderTest, batch: MicroBatch, objective: Objective) -> None:
    """Clipping the gradient to half its norm halves the fall of the loss."""
    faint, norm, rate = _fainter(subject, batch, objective)
    expected = rate * norm**2 / 2
    fall = _fall(subject, faint, objective, rate, grad_clip=norm / 2)
    require_equal(fall, expected, 0.1 * expected, "the fall of the loss after a small step that is clipped")


def _fainter(subject: TrainerUnderTest, batch: MicroBatch, objective: Objective) -> tuple[MicroBatch, float, float]:
    """Return the batch with its weights scaled to a small gradient, that gradient's norm, and a learning rate."""
    trainer = started(subject)
    loss = trainer.backward([batch], objective)[0].loss
    norm = trainer.optimizer_step(learning_rate=0.0).grad_norm
    require(norm > 0, "the objective has no gradient")
    scale = _FAINT / norm
    faint = replace(batch, weights=(batch.weights * np.float32(scale)).astype(np.float32))
    return faint, _FAINT, _SHARE * abs(loss) * scale / _FAINT**2


def _fall(
    subject: TrainerUnderTest, batch: MicroBatch, objective: Objective, rate: float, *, grad_clip: float = 0.0
) -> float:
    trainer = started(subject, grad_clip=grad_clip)
    loss = trainer.backward([batch], objective)[0].loss
    norm = trainer.optimizer_step(learning_rate=rate).grad_norm
    require_equal(norm, _FAINT, 0.01 * _FAINT, "grad_norm of an objective whose weights are scaled")
    return loss - trainer.backward([batch], objective)[0].loss
