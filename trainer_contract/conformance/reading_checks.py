"""The check of the conformance kit on what is read while passes run: publications and checkpoints cost no time so."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from trainer_contract.conformance.probes import (
    LINEAR,
    Subject,
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
#: Between two reads, so that they fall into every part of the passes.
_PAUSE_S: Final = 0.002


def reads_are_of_the_last_step(subject: Subject, directory: Path) -> None:
    """Gathered and saved while passes run on another thread, weights and state are what the last step left."""
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
                require_same_weights(weights_of(trainer), left, 0.0, "weights gathered beside the passes")
            trainer.save_state(directory)
        finally:
            ended.set()
        running.result()
    restored = started(subject, restore_from=directory)
    require_same_weights(weights_of(restored), left, 0.0, "weights saved beside the passes")
    got, right = stepped(restored, [batch]), stepped(trainer, [batch])
    require((got.loss, got.norm) == (right.loss, right.norm), "the step after a state saved beside the passes differs")
    require_same_weights(got.weights, right.weights, 0.0, "weights of the step after")
