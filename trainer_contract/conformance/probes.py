"""Inputs and comparisons of the conformance kit: fixed rollouts, minimal objectives, assertions with messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer_contract.errors import SpecError, TrainerError
from trainer_contract.trainer import Trainer
from trainer_contract.types import Columns, Head, MicroBatch, Objective, OptimizerSpec, TrainerSpec

Weights = dict[str, NDArray[np.float64]]

#: Largest vocabulary over which a check sums probabilities; the check packs one segment for each token of it.
_MAX_SUMMED_VOCABULARY: Final = 8192


class CheckUnsupported(Exception):
    """Raised by a check that does not apply to this trainer."""


class Learns(StrEnum):
    """The parameters that a spec's options make trainable."""

    WEIGHTS = "weights"
    """The gathered weights; the change of the weights reveals the gradient."""
    ADAPTERS = "adapters"
    """Adapters, which are merged into the weights before they are gathered."""


class TrainerUnderTest(NamedTuple):
    """The trainer class to test, and a spec for a small fp32 model of `vocab_size` tokens (at least 8).

    To test a value head, run the kit again with `Head.VALUE`; a trainer without value heads raises SpecError.
    """

    factory: Callable[[], Trainer]
    spec: TrainerSpec
    vocab_size: int
    learns: Learns = Learns.WEIGHTS


@dataclass(frozen=True, slots=True)
class LinearObjective:
    """The loss −Σ weights·advantages·predictions, written with operators that all array libraries have."""

    needs: frozenset[str] = frozenset()

    def evaluate(self, predictions: Any, columns: Columns, /) -> Any:
        return -(predictions * columns["weights"] * columns["advantages"]).sum()

    def prediction_gradient(self, predictions: Any, columns: Columns, /) -> Any:
        return -(predictions * 0 + columns["weights"] * columns["advantages"])


LINEAR: Final = LinearObjective()


@dataclass(frozen=True, slots=True)
class ColumnObjective:
    """The loss −Σ weights·(1 + column)·predictions, which reveals whether a trainer passes an optional column."""

    name: str
    needs: frozenset[str] = frozenset()

    def evaluate(self, predictions: Any, columns: Columns, /) -> Any:
        return -(predictions * self._factors(columns)).sum()

    def prediction_gradient(self, predictions: Any, columns: Columns, /) -> Any:
        return -(predictions * 0 + self._factors(columns))

    def _factors(self, columns: Columns) -> Any:
        column = columns.get(self.name)
        return columns["weights"] * (1 if column is None else 1 + column)


def pack(rollouts: Sequence[Sequence[int]], *, prompt: int = 1, temperature: float = 1.0) -> MicroBatch:
    """Pack rollouts into one micro-batch; a token's advantage depends on its rollout's tokens, not on the packing."""
    lengths = [len(rollout) for rollout in rollouts]
    positions = np.concatenate([np.arange(length) for length in lengths])
    tokens = np.concatenate([np.asarray(rollout) for rollout in rollouts])
    mask = positions >= max(prompt, 1)
    sums = np.repeat([sum(rollout) for rollout in rollouts], lengths)
    return MicroBatch(
        token_ids=tokens.astype(np.int32),
        position_ids=positions.astype(np.int32),
        segment_ids=np.repeat(np.arange(len(lengths)), lengths).astype(np.int32),
        loss_mask=mask,
        advantages=np.where(mask, np.cos(sums + positions), 0.0).astype(np.float32),
        weights=np.where(mask, 0.125, 0.0).astype(np.float32),
        behavior_logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
        temperatures=np.full(len(tokens), temperature, dtype=np.float32),
        num_segments=len(lengths),
    )


def rollouts_of(vocab_size: int, *, lengths: Sequence[int] = (5, 3, 7, 2, 4, 6)) -> list[list[int]]:
    """Return rollouts of different `lengths`, always the same ones for a vocabulary."""
    return [[(7 * i + 3 * t * t + t) % vocab_size for t in range(length)] for i, length in enumerate(lengths)]


def every_next_token(subject: TrainerUnderTest) -> list[list[int]]:
    """Return a rollout [1, token] for each token of the vocabulary. Raises `CheckUnsupported` if it is large."""
    if subject.vocab_size > _MAX_SUMMED_VOCABULARY:
        raise CheckUnsupported(f"a vocabulary of {subject.vocab_size} is too large to sum over; try a smaller model")
    return [[1, token] for token in range(subject.vocab_size)]


def weights_of(trainer: Trainer) -> Weights:
    """Return a copy of the gathered weights, in float64."""
    copies = {}
    for name, array in trainer.gather_weights():
        host = array.detach().float().cpu().numpy() if hasattr(array, "detach") else array
        copies[name] = np.array(host, dtype=np.float64)
    return copies


def started(subject: TrainerUnderTest, *, restore_from: Path | None = None, grad_clip: float = 0.0) -> Trainer:
    """Create a trainer whose first step reveals the gradient (AdamW with eps = 1)."""
    optimizer = OptimizerSpec(betas=(0.9, 0.95), eps=1.0, weight_decay=0.0, grad_clip=grad_clip)
    trainer = subject.factory()
    try:
        trainer.init_worker(replace(subject.spec, optimizer=optimizer, restore_from=restore_from))
    except SpecError as error:
        if subject.spec.head is Head.VALUE:
            raise CheckUnsupported(f"no value head: {error}") from error
        raise
    return trainer


def warmed_up(subject: TrainerUnderTest) -> Trainer:
    """Create a trainer whose predictions differ between tokens; a value head starts at 0, so take three steps."""
    trainer = started(subject)
    for _ in range(3 if subject.spec.head is Head.VALUE else 0):
        stepped(trainer, [pack(rollouts_of(subject.vocab_size))], rate=1.0)
    return trainer


class ProbeStep(NamedTuple):
    """One step: loss, reported norm, new weights, old − new weights, and the gradient inferred from this difference."""

    loss: float
    norm: float
    weights: Weights
    decrease: Weights
    gradient: Weights


def stepped(
    trainer: Trainer, batches: Sequence[MicroBatch], rate: float = 0.1, objective: Objective = LINEAR
) -> ProbeStep:
    """Run one `backward` call on the batches, then one `optimizer_step`."""
    before = weights_of(trainer)
    loss = sum(stats.loss for stats in trainer.backward(batches, objective))
    norm = trainer.optimizer_step(learning_rate=rate).grad_norm
    after = weights_of(trainer)
    decrease = {name: before[name] - after[name] for name in after}
    # AdamW's first update with eps = 1 is u = g / (|g| + 1), so that g = u / (1 − |u|).
    gradient = {name: step / (rate - np.abs(step)) for name, step in decrease.items()}
    return ProbeStep(loss, norm, after, decrease, gradient)


def check_small_step(
    subject: TrainerUnderTest, batch: MicroBatch, objective: Objective, *, rate: float, what: str
) -> ProbeStep:
    """Fail unless a small step along the gradient reduces the loss as predicted; return the step."""
    trainer = started(subject)
    step = stepped(trainer, [batch], rate, objective)
    predicted = sum(float((step.gradient[name] * decrease).sum()) for name, decrease in step.decrease.items())
    require(predicted > 0, f"{what} changed no weight")
    fall = step.loss - trainer.backward([batch], objective)[0].loss
    require_equal(fall, predicted, 0.1 * predicted, f"the fall of the loss after {what}")
    return step


def norm_of(gradient: Weights) -> float:
    """Return the L2 norm over all parameters."""
    return float(np.sqrt(sum((part**2).sum() for part in gradient.values())))


def require(condition: bool, message: str) -> None:
    """Fail the check with `message` unless `condition` is true."""
    if not condition:
        raise AssertionError(message)


def require_equal(got: Any, expected: Any, tolerance: float, what: str) -> None:
    """Fail unless the largest difference of `got` from `expected` is within `tolerance`; NaN fails too."""
    distance = float(np.max(np.abs(np.asarray(got, np.float64) - np.asarray(expected, np.float64))))
    require(distance <= tolerance, f"{what} must agree within {tolerance:.3g}, the difference is {distance:.3g}")


def require_same_weights(got: Weights, expected: Weights, tolerance: float, what: str) -> None:
    """Fail unless both sets of weights have the same names in the same order, and values within `tolerance`."""
    require(list(got) == list(expected), f"{what}: the parameters' names or order changed")
    for name in expected:
        require_equal(got[name], expected[name], tolerance, f"{what}, {name}")


def require_raises(error: type[TrainerError], call: Callable[[], object], what: str) -> None:
    """Fail unless `call` raises `error`; exceptions other than TrainerError propagate."""
    try:
        call()
    except error:
        return
    except TrainerError as other:
        raise AssertionError(f"{what} must raise {error.__name__}, got {type(other).__name__}: {other}") from other
    raise AssertionError(f"{what} must raise {error.__name__}, but nothing was raised")


#: Gradient norm to which `_fainter` scales the objective. It is far below AdamW's eps = 1, so that the first step is
#: close to learning rate · gradient.
_FAINT: Final = 0.01
#: The relative decrease of the loss that the step in `_fainter` aims at: large enough to measure in fp32, small enough
#: that the decrease is proportional to the step.
_SHARE: Final = 1e-3


def loss_decrease_matches_the_gradient(subject: TrainerUnderTest, batch: MicroBatch, objective: Objective) -> None:
    """Check that a small step reduces the loss by the learning rate times the square of the reported gradient norm.

    Merged weights of adapters do not reveal the gradient g, but the loss does. With AdamW's eps = 1 and |g| far below
    1, the first step is lr·g, which reduces the loss by lr·|g|². If g is clipped to the norm c, the loss falls by
    lr·c·|g|.
    """
    faint, norm, rate = _fainter(subject, batch, objective)
    fall = _fall(subject, faint, objective, rate)
    expected = rate * norm**2
    require_equal(fall, expected, 0.1 * expected, "the fall of the loss after a small step")


def loss_decrease_is_clipped(subject: TrainerUnderTest, batch: MicroBatch, objective: Objective) -> None:
    """Check that clipping the gradient to half its norm halves the decrease of the loss."""
    faint, norm, rate = _fainter(subject, batch, objective)
    expected = rate * norm**2 / 2
    fall = _fall(subject, faint, objective, rate, grad_clip=norm / 2)
    require_equal(fall, expected, 0.1 * expected, "the fall of the loss after a small step that is clipped")


def _fainter(subject: TrainerUnderTest, batch: MicroBatch, objective: Objective) -> tuple[MicroBatch, float, float]:
    """Return the batch with weights scaled so that the gradient is small, that gradient's norm, and a learning rate."""
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
