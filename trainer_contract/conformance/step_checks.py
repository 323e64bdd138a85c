"""Conformance checks of empty steps, weights read during the next step's passes, `forward_at`, and value heads."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from trainer_contract.conformance.probes import (
    LINEAR,
    CheckUnsupported,
    Learns,
    TrainerUnderTest,
    check_small_step,
    every_next_token,
    loss_decrease_matches_the_gradient,
    pack,
    require,
    require_equal,
    require_raises,
    require_same_weights,
    rollouts_of,
    started,
    stepped,
    warmed_up,
    weights_of,
)
from trainer_contract.errors import BatchError, SpecError, StateError
from trainer_contract.host_weights import copied
from trainer_contract.types import Columns, HeadMeasure

_READS: Final = 30
#: Pause in seconds between two reads of weights, to spread the reads over the concurrent passes.
_PAUSE_S: Final = 0.002


def empty_steps_change_no_weight(subject: TrainerUnderTest, _: Path) -> None:
    """A step at learning rate 0, and a step whose mask selects no token, increment the version and change no weight."""
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
    """Weights and states that are read while passes run on another thread are those of the last step."""
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


_TOLERANCE: Final = 2e-4


def values_belong_to_prior_states(subject: TrainerUnderTest, _: Path) -> None:
    """The value of a token depends neither on that token nor on its temperature, only on the state before it."""
    trainer, (rollout, *_rest) = warmed_up(subject), rollouts_of(subject.vocab_size, lengths=(8,))
    values = trainer.forward([pack([rollout])])[0]
    require(float(np.ptp(values[1:])) > 0, "three steps left the same value for every state")
    other = [*rollout[:-1], (rollout[-1] + 1) % subject.vocab_size]
    require_equal(trainer.forward([pack([other])])[0], values, _TOLERANCE, "values after only the last token changed")
    cooled = trainer.forward([pack([rollout], temperature=0.5)])[0]
    require_equal(cooled, values, _TOLERANCE, "values at temperature 0.5")


def forward_at_uses_the_given_weights(subject: TrainerUnderTest, _: Path) -> None:
    """`forward_at` predicts as a trainer with the given weights would, however many steps this trainer took since."""
    rollouts = rollouts_of(subject.vocab_size)
    batches = [pack(rollouts[:2], temperature=0.7), pack(rollouts[2:])]
    trainer = started(subject)
    history, expected = [], []
    for _step in range(3):
        history.append(copied(trainer.gather_weights()))
        expected.append([trainer.forward([batch])[0] for batch in batches])
        stepped(trainer, [pack(rollouts)], rate=1.0)
    moved = max(float(np.abs(a - b).max()) for a, b in zip(expected[0], expected[2], strict=True))
    require(moved > 10 * _TOLERANCE, f"two steps at rate 1 moved the predictions by {moved:.3g} only")
    for version in (0, 2, 1):
        for got, right in zip(trainer.forward_at(batches, history[version]), expected[version], strict=True):
            require(got.dtype == np.float32 and got.shape == right.shape, "forward_at must return f32 [T] of each")
            require_equal(got, right, _TOLERANCE, f"predictions of forward_at, at the weights of version {version},")


def forward_at_has_no_side_effect(subject: TrainerUnderTest, _: Path) -> None:
    """`forward_at` does not change any bit of later results, even if called between backward and step."""
    rollouts = rollouts_of(subject.vocab_size)
    batch = pack(rollouts)

    def run_steps(*, disturbed: bool) -> tuple[list[float], list[bytes], dict[str, np.ndarray]]:
        trainer = started(subject)
        first = copied(trainer.gather_weights())
        numbers, predictions = [], []
        for _step in range(3):
            numbers.append(trainer.backward([batch], LINEAR)[0].loss)
            if disturbed:
                trainer.forward_at([batch, pack(rollouts[:2])], first)
            predictions.append(trainer.forward([batch])[0].tobytes())
            numbers.append(trainer.backward([pack(rollouts[1:])], LINEAR)[0].loss)
            numbers.append(trainer.optimizer_step(learning_rate=0.1).grad_norm)
        return [*numbers, trainer.model_version], predictions, weights_of(trainer)

    plain, after = run_steps(disturbed=False), run_steps(disturbed=True)
    require(after[0] == plain[0], f"losses, norms and version must be {plain[0]}, got {after[0]}")
    require(after[1] == plain[1], "predictions after forward_at must have the same bits as without it")
    require_same_weights(after[2], plain[2], 0.0, "weights after steps with forward_at between")


def forward_at_refuses_foreign_weights(subject: TrainerUnderTest, _: Path) -> None:
    """`forward_at` raises StateError for weights that do not fit the model, and BatchError for malformed batches."""
    trainer, batch = started(subject), pack(rollouts_of(subject.vocab_size))
    weights, before = dict(copied(trainer.gather_weights())), trainer.forward([batch])[0].tobytes()
    first = next(iter(weights))
    broken = {
        "without a parameter": {name: each for name, each in weights.items() if name != first},
        "with a parameter cut short": weights | {first: weights[first][:-4]},
        "with a parameter that the model does not have": weights | {"no.such.parameter": weights[first]},
    }
    for what, given in broken.items():
        require_raises(StateError, partial(trainer.forward_at, [batch], given), f"forward_at {what}")
    malformed = replace(batch, num_segments=batch.num_segments + 1)
    require_raises(BatchError, lambda: trainer.forward_at([malformed], weights), "forward_at of a malformed batch")
    require(trainer.forward([batch])[0].tobytes() == before, "a refused forward_at left other weights behind")


# --- measures of the output distribution, and their gradients ---------------------------------------------------------

_MEASURE_TOLERANCE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class _Measuring:
    measure: HeadMeasure

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({self.measure})

    def evaluate(self, predictions: Any, columns: Columns, /) -> Any:
        return -(columns[self.measure] * columns["weights"]).sum() + 0.0 * predictions.sum()

    def prediction_gradient(self, predictions: Any, columns: Columns, /) -> Any:
        return predictions * 0

    def measure_gradients(self, predictions: Any, columns: Columns, /) -> Mapping[HeadMeasure, Any]:
        return {self.measure: -(predictions * 0 + columns["weights"])}


def measures_match_the_distribution(subject: TrainerUnderTest, _: Path) -> None:
    """Mean log-prob and entropy match `forward` at each temperature, and a step along their gradient raises them."""
    rollouts = every_next_token(subject)
    for temperature in (1.0, 0.5):
        for measure in HeadMeasure:
            trainer = started(subject)
            every = pack(rollouts, temperature=temperature)
            logprobs = trainer.forward([every])[0][1::2].astype(np.float64)
            mean, entropy = float(logprobs.mean()), float(-(np.exp(logprobs) * logprobs).sum())
            expected = mean if measure is HeadMeasure.MEAN_LOGPROB else entropy
            batch = pack([[1, 2]], temperature=temperature)
            try:
                loss = trainer.backward([batch], _Measuring(measure))[0].loss
            except SpecError as error:
                raise CheckUnsupported(f"no {measure}: {error}") from error
            weight = float(batch.weights.sum())
            require_equal(-loss / weight, expected, _MEASURE_TOLERANCE, f"{measure} at temperature {temperature}")
    for measure in HeadMeasure:
        _gradient_is_of(measure, subject)


def _gradient_is_of(measure: HeadMeasure, subject: TrainerUnderTest) -> None:
    trainer, objective = started(subject), _Measuring(measure)
    batch = pack(rollouts_of(subject.vocab_size), temperature=0.7)
    if subject.learns is Learns.ADAPTERS:
        loss_decrease_matches_the_gradient(subject, batch, objective)
        return
    scale = abs(trainer.backward([batch], objective)[0].loss)
    norm = trainer.optimizer_step(learning_rate=0.0).grad_norm
    require(norm > 0, f"{measure} has no gradient")
    # Choose a step that changes the loss enough to measure in fp32, and so little that the change is linear.
    rate = min(1e-2, 1e-3 * scale / norm**2)
    check_small_step(subject, batch, objective, rate=rate, what=f"a small step along {measure}")


def value_heads_have_no_distribution(subject: TrainerUnderTest, _: Path) -> None:
    """A value head rejects an objective that needs a measure, with SpecError."""
    trainer, batch = started(subject), pack(rollouts_of(subject.vocab_size))
    for measure in HeadMeasure:
        objective = _Measuring(measure)
        require_raises(SpecError, partial(trainer.backward, [batch], objective), f"backward with {measure}")
