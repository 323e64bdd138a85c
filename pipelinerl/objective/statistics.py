"""Metrics of a step: numpy functions of its micro-batches and of the log-probs used in their loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.streams import StreamedObjective
from pipelinerl.objective.tokens import Policy, Tokens
from trainer_contract.types import Float32, MicroBatch

_REQUIRED: Final = ("advantages", "weights", "behavior_logprobs")
_OPTIONAL: Final = ("old_logprobs", "ref_logprobs", "values", "streams")


def trained_tokens(micro_batches: Sequence[MicroBatch], logprobs: Sequence[Float32]) -> Tokens | None:
    """Return all tokens of a step inside the loss masks as one micro-batch in float64; None if there are none."""
    masks = [batch.loss_mask for batch in micro_batches]
    if not any(mask.any() for mask in masks):
        return None

    def joined(columns: Sequence[NDArray[Any]]) -> NDArray[np.float64]:
        parts = [column[mask] for column, mask in zip(columns, masks, strict=True)]
        return np.concatenate(parts).astype(np.float64)

    first_segments = np.cumsum([0, *(batch.num_segments for batch in micro_batches)])
    owners = [batch.segment_ids if batch.rollout_ids is None else batch.rollout_ids for batch in micro_batches]
    segments = [own + first for own, first in zip(owners, first_segments, strict=False)]
    present = [name for name in _OPTIONAL if getattr(micro_batches[0], name) is not None]
    columns: dict[str, Any] = {
        name: joined([getattr(batch, name) for batch in micro_batches]) for name in (*_REQUIRED, *present)
    }
    columns["segment_ids"] = joined(segments).astype(np.int64)
    columns["num_segments"] = int(first_segments[-1])
    columns["loss_mask"] = np.ones(columns["weights"].shape, dtype=bool)
    return Tokens.of(joined(logprobs), columns)


def statistics(objective: PolicyObjective | StreamedObjective, tokens: Tokens | None) -> dict[str, float]:
    """Return metrics of a step, computed from its trained tokens; {} if no token trained.

    `entropy` is the mean surprisal of the sampled tokens. `kl_k1` and `kl_k3` estimate KL(behavior ‖ current); `kl_old`
    is K3 of KL(old ‖ current), if old log-probs are available. `ess` is the effective sample size of the ratios
    current/behavior as a fraction of the tokens, 1 when on-policy.
    """
    if tokens is None:
        return {}
    difference = tokens.log_ratio(Policy.CURRENT, Policy.BEHAVIOR)
    ratio, distance = np.exp(difference), np.abs(difference)
    figures = {
        "entropy": -tokens.logprobs.mean(),
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "ess": ratio.mean() ** 2 / (ratio**2).mean(),
        "kl_k1": -difference.mean(),
        "kl_k3": (np.expm1(difference) - difference).mean(),
        "logprob_difference_mean": distance.mean(),
        "logprob_difference_max": distance.max(),
        "clip_fraction": _cut(objective, tokens, lambda part: part.grad1.clipped(tokens)).mean(),
        "truncated_fraction": _cut(objective, tokens, lambda part: part.is_weight.truncated(tokens)).mean(),
    }
    if tokens.columns.get("old_logprobs") is not None:
        moved = tokens.log_ratio(Policy.CURRENT, Policy.OLD)
        figures["kl_old"] = (np.expm1(moved) - moved).mean()
    return {name: float(value) for name, value in figures.items()}


def cuts(objective: PolicyObjective | StreamedObjective, tokens: Tokens | None) -> dict[str, NDArray[np.bool_]]:
    """Return the masks [N] of tokens with clipped gradient, truncated weight, weight 0 (`masked`); or {}."""
    if tokens is None:
        return {}
    masked = _cut(objective, tokens, lambda part: part.is_weight.weight(tokens) == 0)
    return {
        "clipped": _cut(objective, tokens, lambda part: part.grad1.clipped(tokens)),
        "truncated": _cut(objective, tokens, lambda part: part.is_weight.truncated(tokens)) & ~masked,
        "masked": masked,
    }


def _cut(
    objective: PolicyObjective | StreamedObjective, tokens: Tokens, rule: Callable[[PolicyObjective], Any]
) -> NDArray[np.bool_]:
    if isinstance(objective, PolicyObjective):
        mask: NDArray[np.bool_] = rule(objective)
        return mask
    streams = tokens.columns["streams"]
    return np.any([(streams == loss.code) & rule(part) for loss, part in objective.parts.items()], axis=0)
