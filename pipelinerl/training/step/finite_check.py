"""The guard: a NaN or an infinity is found before it reaches a weight, and is given the name of what it came from.

A step whose loss, gradient or log-probs are not finite is skipped. To say why, the columns are looked at first, then
the terms of the objective one by one on the log-probs of the step; what is left is the model's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.tokens import Tokens
from pipelinerl.training.rollouts.batch import TrainBatch
from trainer_contract.types import Float32, MicroBatch

#: In the order in which they are computed, so that the first that is broken is the cause of the others.
_COLUMNS: Final = (
    "behavior_logprobs", "weights", "old_logprobs", "ref_logprobs", "values", "advantages", "returns"
)  # fmt: skip


@final
@dataclass(frozen=True, slots=True)
class Poison:
    """Why a step was skipped: the column, term or quantity that is not finite, and the orders of its groups."""

    what: str
    groups: list[int]

    def __str__(self) -> str:
        return f"{self.what} of group{'s' * (len(self.groups) != 1)} {', '.join(map(str, self.groups))}"


def in_rewards(batch: TrainBatch) -> Poison | None:
    """Judged rewards, from the verifier and as shaped, before anything is computed from them."""
    verdicts = np.array([rollout.verdict.reward for group in batch.groups for rollout in group.rollouts])
    scored = batch.scored
    for rewards in (verdicts, scored.rewards):
        broken = scored.valid & ~np.isfinite(rewards)
        if broken.any():
            return Poison("rewards", sorted({batch.groups[i].index for i in scored.groups[broken].tolist()}))
    return None


def in_columns(batch: TrainBatch, completed: Sequence[MicroBatch]) -> Poison | None:
    """The first column that is not finite on some token of the loss mask."""
    for name in _COLUMNS:
        groups: set[int] = set()
        for number, micro_batch in enumerate(completed):
            column = getattr(micro_batch, name)
            if column is not None:
                groups |= _groups_of(batch, number, micro_batch, ~np.isfinite(column))
        if groups:
            return Poison(name, sorted(groups))
    return None


def in_predictions(
    batch: TrainBatch, number: int, micro_batch: MicroBatch, predictions: Float32, *, what: str
) -> Poison | None:
    """Predictions that a finite loss was evaluated on."""
    groups = _groups_of(batch, number, micro_batch, ~np.isfinite(predictions))
    return Poison(what, sorted(groups)) if groups else None


def in_terms(
    batch: TrainBatch, number: int, micro_batch: MicroBatch, logprobs: Float32, objective: PolicyObjective
) -> Poison | None:
    """The first slot of the objective whose value or gradient on these log-probs is not finite, in fp32 as there."""
    columns = {name: getattr(micro_batch, name) for name in (*_COLUMNS, "loss_mask", "segment_ids", "num_segments")}
    with np.errstate(all="ignore"):
        tokens = Tokens.of(logprobs, columns)
        terms = {
            "is_weight": objective.is_weight.weight(tokens),
            "grad1": objective.grad1.value(tokens),
            "grad2": objective.grad2.value(tokens),
            "loss gradient": objective.prediction_gradient(logprobs, columns),
        }
    for name, values in terms.items():
        groups = _groups_of(batch, number, micro_batch, ~np.isfinite(values))
        if groups:
            return Poison(name, sorted(groups))
    return None


def everywhere(batch: TrainBatch, what: str) -> Poison:
    """It cannot be said which group: all of them."""
    return Poison(what, [group.index for group in batch.groups])


def _groups_of(batch: TrainBatch, number: int, micro_batch: MicroBatch, broken: NDArray[np.bool_]) -> set[int]:
    return set(batch.group_indices(number, np.unique(micro_batch.segment_ids[broken & micro_batch.loss_mask])))
