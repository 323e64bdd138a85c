"""Conformance checks of `HeadMeasure`: statistics of the output distribution and their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, final

import numpy as np

from trainer_contract.conformance.probes import (
    CheckUnsupported,
    Learns,
    TrainerUnderTest,
    gradient_of,
    loss_decrease_matches_the_gradient,
    pack,
    require,
    require_equal,
    require_raises,
    rollouts_of,
    started,
    weights_of,
)
from trainer_contract.errors import SpecError
from trainer_contract.types import Columns, HeadMeasure

_TOLERANCE: Final = 1e-3
#: Largest vocabulary that is summed over; each token takes one segment.
_MAX_SUMMED: Final = 8192


@final
@dataclass(frozen=True, slots=True)
class _Measuring:
    """−Σ weights·measure."""

    measure: HeadMeasure

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({self.measure})

    def evaluate(self, predictions: Any, columns: Columns, /) -> Any:
        """Return the scalar loss."""
        return -(columns[self.measure] * columns["weights"]).sum() + 0.0 * predictions.sum()

    def prediction_gradient(self, predictions: Any, columns: Columns, /) -> Any:
        """Return d loss / d predictions in closed form, [T]."""
        return predictions * 0

    def measure_gradients(self, predictions: Any, columns: Columns, /) -> Mapping[HeadMeasure, Any]:
        """Return d loss / d measure in closed form, [T]."""
        return {self.measure: -(predictions * 0 + columns["weights"])}


def measures_match_the_distribution(subject: TrainerUnderTest, _: Path) -> None:
    """Mean log-prob and entropy match those of `forward` on every token at its temperature; a step along them raises
    them.
    """
    if subject.vocab_size > _MAX_SUMMED:
        raise CheckUnsupported(f"a vocabulary of {subject.vocab_size} is too large to sum over; try a smaller model")
    for temperature in (1.0, 0.5):
        for measure in HeadMeasure:
            trainer = started(subject)
            every = pack([[1, token] for token in range(subject.vocab_size)], temperature=temperature)
            logprobs = trainer.forward([every])[0][1::2].astype(np.float64)
            mean, entropy = float(logprobs.mean()), float(-(np.exp(logprobs) * logprobs).sum())
            expected = mean if measure is HeadMeasure.MEAN_LOGPROB else entropy
            batch = pack([[1, 2]], temperature=temperature)
            try:
                loss = trainer.backward([batch], _Measuring(measure))[0].loss
            except SpecError as error:
                raise CheckUnsupported(f"no {measure}: {error}") from error
            weight = float(batch.weights.sum())
            require_equal(-loss / weight, expected, _TOLERANCE, f"{measure} at temperature {temperature}")
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
    rate = min(1e-2, 1e-3 * scale / norm**2)  # resolvable in fp32, yet proportional to the step
    trainer = started(subject)
    before = weights_of(trainer)
    loss = trainer.backward([batch], objective)[0].loss
    trainer.optimizer_step(learning_rate=rate)
    moved = {name: before[name] - weight for name, weight in weights_of(trainer).items()}
    predicted = sum(float((gradient_of(step, rate) * step).sum()) for step in moved.values())
    require(predicted > 0, f"a step along {measure} changed no weight")
    fall = loss - trainer.backward([batch], objective)[0].loss
    require_equal(fall, predicted, 0.1 * predicted, f"the fall of −{measure} after a small step")


def value_heads_have_no_distribution(subject: TrainerUnderTest, _: Path) -> None:
    """A value head rejects an objective that needs a measure, with SpecError."""
    trainer, batch = started(subject), pack(rollouts_of(subject.vocab_size))
    for measure in HeadMeasure:
        objective = _Measuring(measure)
        require_raises(SpecError, partial(trainer.backward, [batch], objective), f"backward with {measure}")


MEASURES: Final = (measures_match_the_distribution,)
VALUE_MEASURES: Final = (value_heads_have_no_distribution,)
