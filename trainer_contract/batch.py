"""Validation of micro-batches against the layout of `types.MicroBatch`; trainers call `check` first in each pass."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from trainer_contract.errors import BatchError, SpecError
from trainer_contract.types import Head, MicroBatch, Objective, RoutingShape, measures_of

_COLUMNS = {
    "token_ids": np.int32,
    "position_ids": np.int32,
    "segment_ids": np.int32,
    "loss_mask": np.bool_,
    "advantages": np.float32,
    "weights": np.float32,
    "behavior_logprobs": np.float32,
    "temperatures": np.float32,
}
_OPTIONAL = {
    "old_logprobs": np.float32,
    "ref_logprobs": np.float32,
    "values": np.float32,
    "returns": np.float32,
    "kl_coefficients": np.float32,
    "streams": np.int32,
    "behavior_versions": np.int32,
    "rollout_ids": np.int32,
}


def check(
    batch: MicroBatch, *, vocab_size: int, needs: Iterable[str] = (), routing: RoutingShape | None = None
) -> None:
    """Raise BatchError for the first column with a wrong shape, dtype, range or packing.

    Token ids must be below `vocab_size`, and the columns `needs` must be present. `routing` gives the shape that
    recorded MoE experts must have; None if the model has no routers or the trainer cannot replay recorded experts.
    """
    for name, dtype in _COLUMNS.items():
        _check_column(name, getattr(batch, name), dtype, batch.token_ids)
    for name, dtype in _OPTIONAL.items():
        column = getattr(batch, name)
        if column is not None:
            _check_column(name, column, dtype, batch.token_ids)
        elif name in needs:
            raise BatchError(f"the objective needs the column {name}, got None: compute it before backward")
    _check_values(batch, vocab_size)
    _check_packing(batch)
    if batch.routed_experts is not None:
        _check_routing(batch.routed_experts, batch.num_tokens, routing)


def check_measures(objective: Objective, head: Head) -> None:
    """Raise SpecError if the objective reads a `HeadMeasure` and the head predicts values, not a distribution."""
    if (measures := measures_of(objective)) and head is Head.VALUE:
        raise SpecError(f"a value head has no distribution to measure, asked for {', '.join(measures)}")


def _check_column(name: str, column: object, dtype: type, token_ids: object) -> None:
    if not isinstance(column, np.ndarray) or not isinstance(token_ids, np.ndarray):
        raise BatchError(f"{name} must be a numpy array, got {type(column).__name__}")
    if column.dtype != dtype:
        raise BatchError(f"{name} must have dtype {np.dtype(dtype)}, got {column.dtype}")
    if column.ndim != 1 or column.shape != token_ids.shape:
        raise BatchError(f"{name} must have the shape of token_ids, {token_ids.shape} = [T], got {column.shape}")


def _check_values(batch: MicroBatch, vocab_size: int) -> None:
    if batch.num_tokens == 0:
        raise BatchError("a micro-batch must have at least one token, got none")
    low, high = int(batch.token_ids.min()), int(batch.token_ids.max())
    if low < 0 or high >= vocab_size:
        raise BatchError(f"token_ids must lie in 0..{vocab_size - 1}, got {low if low < 0 else high}")
    if not batch.temperatures.min() > 0.0:
        raise BatchError("temperatures must be above 0: greedy samples have no log-probs to train on")


def _check_packing(batch: MicroBatch) -> None:
    starts = np.flatnonzero(np.diff(batch.segment_ids, prepend=-1))
    lengths = np.diff(starts, append=batch.num_tokens)
    if not np.array_equal(batch.segment_ids[starts], np.arange(batch.num_segments)):
        raise BatchError(f"segment_ids must be 0..{batch.num_segments - 1} without gaps, not decreasing")
    expected = np.arange(batch.num_tokens) - np.repeat(starts, lengths)
    if not np.array_equal(batch.position_ids, expected):
        wrong = int(np.flatnonzero(batch.position_ids != expected)[0])
        raise BatchError(
            f"position_ids must restart at 0 in each segment and count up: token {wrong} must have {expected[wrong]}, "
            f"got {batch.position_ids[wrong]}"
        )
    if batch.rollout_ids is not None:
        owners = batch.rollout_ids[starts]
        if owners.min() < 0 or owners.max() >= batch.num_segments:
            raise BatchError(
                f"rollout_ids must lie in 0..{batch.num_segments - 1}, got {owners.min()} to {owners.max()}"
            )
        if not np.array_equal(batch.rollout_ids, np.repeat(owners, lengths)):
            raise BatchError("rollout_ids must be the same on all tokens of a segment")
    if batch.loss_mask[starts].any():
        raise BatchError("loss_mask must be False on the first token of a segment: nothing predicts it")


def _check_routing(column: object, num_tokens: int, routing: RoutingShape | None) -> None:
    if routing is None:
        raise BatchError("routed_experts must be None: this model, in this trainer, has no routers that replay them")
    shape = (num_tokens, routing.layers, routing.top_k)
    if not isinstance(column, np.ndarray) or column.dtype != routing.dtype or column.shape != shape:
        got = f"{column.dtype} {column.shape}" if isinstance(column, np.ndarray) else type(column).__name__
        raise BatchError(f"routed_experts must be {routing.dtype} [T, layers, top_k] = {shape}, got {got}")
    if num_tokens and int(column.max()) >= routing.experts:
        raise BatchError(f"routed_experts must lie in 0..{routing.experts - 1}, got {int(column.max())}")
