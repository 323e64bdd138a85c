"""Detection of NaN and infinity before they reach a weight, and of their cause.

A step whose loss, gradient or log-probs are not finite raises `NonFiniteStep` and is skipped. To find the cause,
columns are checked first, then each term of the objective with the step's log-probs. If all these are finite, the cause
is the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipelinerl.errors import PipelineError
from pipelinerl.objective.tokens import Tokens
from pipelinerl.training.batch import TrainBatch
from trainer_contract.errors import NonFiniteError
from trainer_contract.types import Float32, LossStats, MicroBatch

#: The checked columns, in order of computation; the first one that is not finite is the cause.
_COLUMNS: Final = (
    "behavior_logprobs", "weights", "old_logprobs", "ref_logprobs", "values", "advantages", "returns"
)  # fmt: skip


class NonFiniteStep(PipelineError):
    """A step must be skipped: `what` (a column, term or metric) is not finite in the groups with indices `groups`."""

    def __init__(self, what: str, groups: list[int]) -> None:
        super().__init__(f"{what} of group{'s' * (len(groups) != 1)} {', '.join(map(str, groups))}")
        self.what = what
        self.groups = groups


@contextmanager
def naming(what: str, groups: list[int]) -> Iterator[None]:
    """Convert a `NonFiniteError` of the block to a `NonFiniteStep` with `what` and the group indices `groups`."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteStep(what, groups) from error


def check_columns(batch: TrainBatch) -> None:
    """Raise NonFiniteStep for the first input of the loss with NaN or infinity.

    Inputs are the rewards of valid verdicts, before and after shaping, and the columns at tokens in the loss mask.
    """
    verdicts = np.array([rollout.verdict.reward for rollout in batch.segments.rollouts])
    scored = batch.scored
    for rewards in (verdicts, scored.rewards):
        broken = scored.valid & ~np.isfinite(rewards)
        if broken.any():
            raise NonFiniteStep("rewards", sorted({batch.groups[i].index for i in scored.groups[broken].tolist()}))
    micro_batches = batch.micro_batches
    for name in _COLUMNS:
        _check(batch, micro_batches, [getattr(each, name) for each in micro_batches], what=name)


def check_predictions(
    batch: TrainBatch, micro_batches: Sequence[MicroBatch], losses: Sequence[LossStats], *, what: str
) -> None:
    """Raise NonFiniteStep if a prediction (log-prob or value) is not finite; the loss may be finite in spite of it.

    `micro_batches` are those of the batch, perhaps with smaller loss masks.
    """
    _check(batch, micro_batches, [loss.predictions for loss in losses], what=what)


def check_terms(batch: TrainBatch, number: int, logprobs: Float32) -> None:
    """Compute the terms of micro-batch `number` in fp32 at these log-probs; raise NonFiniteStep for the first bad one.

    Terms that read whole distributions are not checked, because only the trainer has the distributions.
    """
    objective, micro_batch = batch.objective, batch.micro_batches[number]
    names = (*_COLUMNS, "loss_mask", "segment_ids", "rollout_ids", "num_segments", "kl_coefficients")
    columns = {name: getattr(micro_batch, name) for name in names}
    with np.errstate(all="ignore"):
        tokens = Tokens.of(logprobs, columns)
        terms = {
            "is_weight": objective.is_weight.weight(tokens),
            "grad1": objective.grad1.value(tokens),
            **({} if objective.grad2.measure else {"grad2": objective.grad2.value(tokens)}),
            "loss gradient": objective.prediction_gradient(logprobs, columns),
        }
    for name, values in terms.items():
        if groups := _groups_of(batch, number, micro_batch, ~np.isfinite(values)):
            raise NonFiniteStep(name, sorted(groups))


def _check(
    batch: TrainBatch, micro_batches: Sequence[MicroBatch], columns: Sequence[Float32 | None], *, what: str
) -> None:
    groups: set[int] = set()
    for number, (micro_batch, column) in enumerate(zip(micro_batches, columns, strict=False)):
        if column is not None:
            groups |= _groups_of(batch, number, micro_batch, ~np.isfinite(column))
    if groups:
        raise NonFiniteStep(what, sorted(groups))


def _groups_of(batch: TrainBatch, number: int, micro_batch: MicroBatch, broken: NDArray[np.bool_]) -> set[int]:
    return set(batch.group_indices(number, np.unique(micro_batch.segment_ids[broken & micro_batch.loss_mask])))
