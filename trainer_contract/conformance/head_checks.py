"""Checks of the conformance kit on what a value head means, and on steps in which a model stands still."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from trainer_contract.conformance.probes import (
    LINEAR,
    Subject,
    pack,
    practised,
    require,
    require_equal,
    require_same_weights,
    rollouts_of,
    started,
    weights_of,
)

_TOLERANCE: Final = 2e-4


def values_precede_their_tokens(subject: Subject, _: Path) -> None:
    """A value is of the state before its token: neither that token nor the temperature changes it."""
    trainer, (rollout, *_rest) = practised(subject), rollouts_of(subject.vocab_size, lengths=(8,))
    values = trainer.forward([pack([rollout])])[0]
    require(float(np.ptp(values[1:])) > 0, "three steps left the same value for every state")
    other = [*rollout[:-1], (rollout[-1] + 1) % subject.vocab_size]
    require_equal(trainer.forward([pack([other])])[0], values, _TOLERANCE, "values after only the last token changed")
    cooled = trainer.forward([pack([rollout], temperature=0.5)])[0]
    require_equal(cooled, values, _TOLERANCE, "values at temperature 0.5")


def steps_may_stand_still(subject: Subject, _: Path) -> None:
    """A step at rate 0, and a step on no token of a loss mask, raise the version and change no weight."""
    trainer, batch = started(subject), pack(rollouts_of(subject.vocab_size))
    masked = replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
    before, first = weights_of(trainer), trainer.model_version
    loss = trainer.backward([masked], LINEAR)[0].loss
    norm = trainer.optimizer_step(learning_rate=0.0).grad_norm
    require((loss, norm) == (0.0, 0.0), f"loss and norm without a token must be 0, got {loss} and {norm}")
    require_same_weights(weights_of(trainer), before, 0.0, "weights after a step on no token")
    trainer.backward([batch], LINEAR)
    stats = trainer.optimizer_step(learning_rate=0.0)
    require_same_weights(weights_of(trainer), before, 0.0, "weights after a step at rate 0")
    require(stats.model_version == first + 2, f"the version must be {first + 2}, got {stats.model_version}")
