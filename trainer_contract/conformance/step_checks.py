"""Conformance checks of steps: steps that change nothing, and reads during the passes of the next step.

Weights and state are read while passes run, so that publications and checkpoints do not delay training.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from trainer_contract.conformance.probes import (
    LINEAR,
    TrainerUnderTest,
    pack,
    require,
    require_same_weights,
    rollouts_of,
    started,
    stepped,
    weights_of,
)
from trainer_contract.host_weights import copied

_READS: Final = 30
#: Pause between two reads, so that reads fall into every part of the passes.
_PAUSE_S: Final = 0.002


def empty_steps_change_no_weight(subject: TrainerUnderTest, _: Path) -> None:
    """A step at rate 0 and a step without unmasked tokens raise the version and change no weight."""
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


def concurrent_reads_see_the_last_step(subject: TrainerUnderTest, directory: Path) -> None:
    """Weights and state read while passes run on another thread are those after the last step."""
    rollouts = rollouts_of(subject.vocab_size)
    batch = pack(rollouts)
    trainer = started(subject)
    older = copied(trainer.gather_weights())
    stepped(trainer, [batch], rate=1.0)
    left, ended = weights_of(trainer), threading.Event()

    def passes() -> None:
        while not ended.is_set():
            trainer.forward([batch])
            trainer.forward_at([batch, pack(rollouts[:2])], older)
            trainer.backward([batch], LINEAR)
            trainer.discard_gradient()

    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(passes)
        try:
            for _ in range(_READS):
                time.sleep(_PAUSE_S)
                require_same_weights(weights_of(trainer), left, 0.0, "weights gathered during the passes")
            trainer.save_state(directory)
        finally:
            ended.set()
        running.result()
    restored = started(subject, restore_from=directory)
    require_same_weights(weights_of(restored), left, 0.0, "weights saved during the passes")
    got, right = stepped(restored, [batch]), stepped(trainer, [batch])
    require((got.loss, got.norm) == (right.loss, right.norm), "the step after a state saved during the passes differs")
    require_same_weights(got.weights, right.weights, 0.0, "weights of the step after")
