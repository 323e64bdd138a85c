"""Passes over one micro-batch: predictions through the model, and evaluation of the objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl.trainers.torch.packed.planner import Planner
from pipelinerl.trainers.torch.packed.segments import SegmentPlan
from pipelinerl.trainers.torch.packed.sequence_parallel import SequenceGroup, SequencePart
from pipelinerl.trainers.torch.packed.shared_beginnings import Distinct, Reading
from trainer_contract.errors import NonFiniteError
from trainer_contract.types import Bool, Float32, HeadMeasure, LossStats, MicroBatch, Objective, measures_of

#: Function with the arguments of `PackedModel.forward`: a model, or a wrapper such as a sharded model.
Model = Callable[..., Any]


class PassSetting(NamedTuple):
    """The settings of passes: device, planner, and the group of processes that share a micro-batch."""

    device: torch.device
    plan_of: Planner = SegmentPlan.of
    group: SequenceGroup | None = None


class Evaluated(NamedTuple):
    """The result of evaluating an objective: the differentiable loss, and its `LossStats` on the host."""

    loss: Tensor
    stats: LossStats


def predict(
    model: Model,
    setting: PassSetting,
    batch: MicroBatch,
    inside: Bool,
    measures: tuple[HeadMeasure, ...] = (),
) -> Tensor:
    """Return [1 + M, N] for N tokens, those in the mask `inside`: predictions (log-probs or values), then `measures`.

    A measure is a property of the predicted distribution, such as its entropy. If processes share the micro-batch,
    each of them gets the whole result.
    """
    requested, distinct = np.flatnonzero(inside), Distinct.of(batch)
    positions, group = batch.position_ids, setting.group
    if group is None:
        return _computed(model, setting, batch, distinct, positions, requested, measures)
    part = SequencePart.of(group, distinct, positions, requested)
    mine = requested[part.readers[group.place]]
    own = _computed(model, setting, batch, part.distinct, part.position_ids, mine, measures, own=part.own)
    return group.together(own, part.readers)


def _computed(
    model: Model,
    setting: PassSetting,
    batch: MicroBatch,
    distinct: Distinct,
    positions: NDArray[np.int32],
    requested: NDArray[np.int64],
    measures: tuple[HeadMeasure, ...],
    *,
    own: slice | None = None,
) -> Tensor:
    """Return predictions and M measures [1 + M, N] of `requested` tokens, running only `own`, if given."""
    device = setting.device
    tokens = np.append(batch.token_ids, np.zeros(len(positions) - batch.num_tokens, np.int32))
    kept = distinct.kept if own is None else distinct.kept[own]
    computed = np.stack((tokens, positions))[:, kept].astype(np.int64)
    chosen, which = _choices(batch, distinct, requested)
    temperatures = batch.temperatures[chosen]
    predictions: Tensor = model(
        torch.from_numpy(computed).to(device),
        setting.plan_of(positions, device, distinct, setting.group),
        Reading.of(distinct.place[chosen - 1] - (0 if own is None else own.start), len(kept), device),
        torch.from_numpy(batch.token_ids[chosen].astype(np.int64)).to(device),
        None if (temperatures == 1.0).all() else torch.from_numpy(temperatures).to(device),
        measures,
        None if batch.routed_experts is None else torch.from_numpy(_routed(batch, kept)).to(device),
    )
    if len(chosen) == len(requested):
        return predictions
    return Reading.of(which, len(chosen), device)(predictions.T).T


def _choices(
    batch: MicroBatch, distinct: Distinct, requested: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the tokens to predict, and each requested token's index among them, since equal ones share one."""
    place, temperatures = distinct.place[requested], batch.temperatures[requested]
    if (temperatures == temperatures[:1]).all():
        _, first, which = np.unique(place, return_index=True, return_inverse=True)
    else:
        pairs = np.stack((place.astype(np.float64), temperatures))
        _, first, which = np.unique(pairs, axis=1, return_index=True, return_inverse=True)
    if len(first) == len(requested):
        return requested, np.arange(len(requested))
    return requested[first], which.reshape(-1)


def _routed(batch: MicroBatch, kept: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the experts [K, layers, top_k] of the computed tokens.

    In the batch's column, row t + 1 has the experts of token t. Padding and a segment's last token have no recorded
    experts, and their outputs are never read; they get experts 0 to top_k − 1.
    """
    column = batch.routed_experts
    assert column is not None, "the caller checks that experts were recorded"
    following = np.minimum(kept + 1, batch.num_tokens - 1)
    is_known = (following > kept) & (batch.position_ids[following] > 0)
    routed = np.broadcast_to(np.arange(column.shape[2], dtype=np.int32), (len(kept), *column.shape[1:])).copy()
    routed[is_known] = column[following[is_known]]
    return routed


@torch.no_grad()
def predicted(model: Model, setting: PassSetting, batch: MicroBatch) -> Float32:
    """Return predictions f32 [T] of every token that has one; 0 at segment starts."""
    inside = batch.position_ids > 0
    predictions = np.zeros(batch.num_tokens, dtype=np.float32)
    if inside.any():
        predictions[inside] = predict(model, setting, batch, inside)[0].cpu().numpy()
    return predictions


def require_finite(predictions: Float32) -> None:
    """Raise NonFiniteError if a prediction is not finite."""
    if not np.isfinite(predictions).all():
        raise NonFiniteError("the model's predictions are not finite: its weights are broken, restore a checkpoint")


def evaluate(model: Model, setting: PassSetting, batch: MicroBatch, objective: Objective) -> Evaluated:
    """Evaluate the objective on the non-empty loss mask; processes that share the batch get equal results."""
    inside = batch.loss_mask
    measures = measures_of(objective)
    predictions, *measured = predict(model, setting, batch, inside, measures)
    columns = {**_columns(batch, inside, setting.device), **dict(zip(measures, measured, strict=True))}
    loss: Tensor = objective.evaluate(predictions, columns)
    # Copy loss and predictions to the host in one transfer.
    host = torch.cat((loss.detach().reshape(1).float(), predictions.detach().float())).cpu().numpy()
    evaluated = np.zeros(batch.num_tokens, dtype=np.float32)
    evaluated[inside] = host[1:]
    return Evaluated(loss, LossStats(float(host[0]), evaluated))


def made_up_batch(lengths: NDArray[np.int64], *, vocab_size: int) -> MicroBatch:
    """Return segments of these lengths whose tokens count up modulo `vocab_size`; advantages and weights are 0."""
    positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    zeros = np.zeros(len(positions), np.float32)
    return MicroBatch(
        token_ids=np.arange(len(positions), dtype=np.int32) % vocab_size,
        position_ids=positions,
        segment_ids=np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
        loss_mask=positions > 0,
        advantages=zeros,
        weights=zeros,
        behavior_logprobs=zeros,
        temperatures=np.ones(len(positions), np.float32),
        num_segments=len(lengths),
    )


def broken_loss(loss: float, number: int) -> NonFiniteError:
    """Return the NonFiniteError for micro-batch `number`, whose loss is `loss`."""
    return NonFiniteError(
        f"the loss is {loss}: look for NaN or infinity in advantages, weights and the sampler's log-probs; the "
        "gradient was cleared",
        number=number,
    )


def _columns(batch: MicroBatch, inside: Bool, device: torch.device) -> Mapping[str, Any]:
    names = ("loss_mask", "advantages", "weights", "behavior_logprobs", "temperatures")
    optional = ("old_logprobs", "ref_logprobs", "values", "returns", "kl_coefficients", "streams")
    columns = {name: getattr(batch, name) for name in names}
    columns |= {name: column for name in optional if (column := getattr(batch, name)) is not None}
    columns["segment_ids"] = batch.segment_ids.astype(np.int64)
    if batch.rollout_ids is not None:
        columns["rollout_ids"] = batch.rollout_ids.astype(np.int64)
    tensors = {name: torch.from_numpy(column[inside]).to(device) for name, column in columns.items()}
    return tensors | {"num_segments": batch.num_segments}
