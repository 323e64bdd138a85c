"""Routed experts as columns of a group's record: for sampled tokens, and once for each distinct context.

If G rollouts share a prompt, only the first rollout's routing of the prompt is kept. A token costs layers · top_k bytes
(twice that with more than 256 experts), in addition to 8 for its id and log-prob.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelinerl.errors import RecordError
from pipelinerl.types import Turn
from trainer_contract.types import Experts

#: Names of the columns: [N, layers, top_k] of the N sampled tokens, [C, layers, top_k] of the C tokens of contexts.
SAMPLED: Final = "routed_experts"
CONTEXTS: Final = "context_routed_experts"
_DTYPES: Final = (np.dtype(np.uint8), np.dtype("<u2"))


class TurnRouting(NamedTuple):
    """The routed experts of a turn's sampled tokens and of its context, or None if unknown."""

    sampled: Experts | None = None
    context: Experts | None = None


def routing_columns(turns: Sequence[Turn], turn_contexts: Sequence[int]) -> dict[str, NDArray[Any]]:
    """Return the routing columns of these turns; empty if no turn has routing. `turn_contexts` is the index of each
    turn's context. Raises `RecordError` if only some turns have routing, or if the shapes of arrays are
    inconsistent.
    """
    if False not in {turn.routed_experts is None and turn.context_routed_experts is None for turn in turns}:
        return {}
    firsts: dict[int, Turn] = {}
    for turn, number in zip(turns, turn_contexts, strict=True):
        firsts.setdefault(number, turn)
    sampled = [(turn.routed_experts, len(turn.token_ids)) for turn in turns]
    contexts = [(turn.context_routed_experts, len(turn.context_token_ids)) for _, turn in sorted(firsts.items())]
    arrays: list[Experts] = []
    for routed, length in (*sampled, *contexts):
        like = arrays[0] if arrays else routed
        if routed is None or like is None or routed.ndim != 3 or routed.dtype not in _DTYPES or len(routed) != length:
            raise RecordError(
                "routed experts must be u8 or u16 [tokens, layers, top_k], for all turns and their contexts or for "
                f"none; got {'none' if routed is None else f'{routed.dtype} {routed.shape}'} for {length} tokens"
            )
        if (routed.dtype, routed.shape[1:]) != (like.dtype, like.shape[1:]):
            raise RecordError(
                f"routed experts must have the same [layers, top_k], got {like.shape[1:]} and {routed.shape[1:]}"
            )
        arrays.append(routed)
    return {SAMPLED: np.concatenate(arrays[: len(turns)]), CONTEXTS: np.concatenate(arrays[len(turns) :])}


def turn_routing(
    columns: Mapping[str, NDArray[Any]],
    *,
    lengths: Sequence[int],
    turn_contexts: Sequence[int],
    context_lengths: Sequence[int],
) -> list[TurnRouting]:
    """Split the columns into views per turn; raise `ValueError` if they lack the form that `routing_columns` creates.

    `lengths` are the numbers of sampled tokens per turn, `turn_contexts` the index of each turn's context, and
    `context_lengths` the numbers of tokens per context.
    """
    sampled, contexts = columns.get(SAMPLED), columns.get(CONTEXTS)
    if sampled is None and contexts is None:
        return [TurnRouting()] * len(lengths)
    if sampled is None or contexts is None:
        raise ValueError("routed experts need both columns, of sampled tokens and of contexts")
    for column in (sampled, contexts):
        if column.ndim != 3 or column.dtype not in _DTYPES or column.dtype != sampled.dtype:
            raise ValueError(f"routed experts must be u8 or u16 [tokens, layers, top_k], not {column.dtype}")
        if column.shape[1:] != sampled.shape[1:]:
            shapes = f"{sampled.shape[1:]} and {column.shape[1:]}"
            raise ValueError(f"routed experts must have the same [layers, top_k], got {shapes}")
    of_contexts = _parts(contexts, context_lengths)
    return [
        TurnRouting(its, of_contexts[number])
        for its, number in zip(_parts(sampled, lengths), turn_contexts, strict=True)
    ]


def _parts(column: NDArray[Any], lengths: Sequence[int]) -> list[NDArray[Any]]:
    return [column[first:end] for first, end in pairwise((0, *accumulate(lengths)))]
