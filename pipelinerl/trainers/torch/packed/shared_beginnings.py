"""Shared prefixes of a micro-batch's segments, which the model computes only once.

Under causal attention, equal prefixes have equal hidden states in every layer, so the model computes each distinct
prefix once, and gradients are summed. Examples are a system prompt, a group's prompt, and equal first tokens of
answers. The segments form a prefix tree whose nodes are tokens, and a pass costs as much as the tree has nodes. Only
attention sees whole segments (`segments.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_contract.types import MicroBatch

Indices = NDArray[np.int64]

#: Smallest share of tokens that sharing must save. Below it, copying between layouts costs as much as computing the
#: tokens.
_LEAST_SAVED: Final = 1 / 32


class Distinct(NamedTuple):
    """The K tokens that the model computes, out of a micro-batch's T tokens; they are the nodes of the prefix tree.

    `kept` i64 [K] has the indices of the computed tokens, ascending. `place` i64 [T] maps each token to the index, in
    `kept`, of the computed token that represents it.
    """

    kept: Indices
    place: Indices

    @classmethod
    def of(cls, batch: MicroBatch) -> Self:
        """Keep one of all equal tokens that have equal prefixes; keep every token if sharing would save too little.

        If the sampler's experts are replayed, only prompts are shared, since tokens of equal answers may have
        different experts.
        """
        tokens, every = batch.token_ids, np.arange(batch.num_tokens)
        source = every.copy()
        starts = np.flatnonzero(batch.position_ids == 0)
        ends = np.append(starts[1:], batch.num_tokens)
        if batch.routed_experts is not None:
            sampled = np.where(batch.loss_mask, every, batch.num_tokens)
            ends = np.minimum(np.minimum.reduceat(sampled, starts), ends)
        beginnings = [tokens[start:end] for start, end in zip(starts, ends, strict=True)]
        # After sorting by bytes, segments with equal prefixes are adjacent.
        order = sorted(range(len(starts)), key=lambda segment: beginnings[segment].tobytes())
        for before, this in pairwise(order):
            count = _equal(beginnings[before], beginnings[this])
            source[starts[this] : starts[this] + count] = source[starts[before] : starts[before] + count]
        kept = source == every
        if np.count_nonzero(kept) > (1 - _LEAST_SAVED) * batch.num_tokens:
            return cls(every, every)
        return cls(np.flatnonzero(kept), (np.cumsum(kept) - 1)[source])

    def with_padding(self, count: int) -> Self:
        """Append `count` further tokens, each of which is computed."""
        added = np.arange(count)
        return type(self)(np.append(self.kept, len(self.place) + added), np.append(self.place, len(self.kept) + added))


def _equal(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    shorter = min(len(one), len(other))
    (differ,) = np.nonzero(one[:shorter] != other[:shorter])
    return int(differ[0]) if len(differ) else shorter


@dataclass(frozen=True, slots=True)
class Sums:
    """A plan that sums the gradients of all rows that were copied from the same source row.

    Rows are added in pairs, then pairs of pairs, in few rounds and a fixed order: deterministic on every device.

    Attributes:
        rows: i64 [M], the rows whose source was copied several times.
        rounds: for each round, indices into `rows` of the rows to add, and indices of the rows to add them to.
        firsts: i64 [U], indices into `rows` of the rows that contain the final sums.
        places: i64 [U], the source row to which each final sum belongs.
    """

    rows: Tensor
    rounds: tuple[tuple[Tensor, Tensor], ...]
    firsts: Tensor
    places: Tensor

    @classmethod
    def of(cls, place: Indices, device: torch.device, rows: Indices | None = None) -> Self:
        """Plan the sums for N copied rows: row `rows[i]` (default: row i) is a copy of source row `place[i]`."""
        order = np.argsort(place, kind="stable")
        first = np.flatnonzero(np.diff(place[order], prepend=-1))
        counts = np.diff(first, append=len(place))
        shared = order[np.repeat(counts > 1, counts)]
        rank = np.concatenate([np.arange(count) for count in counts[counts > 1]] or [np.zeros(0, np.int64)])
        rounds, distance = [], 1
        while distance <= rank.max(initial=0):
            (giving,) = np.nonzero(rank % (2 * distance) == distance)
            rounds.append((torch.from_numpy(giving).to(device), torch.from_numpy(giving - distance).to(device)))
            distance *= 2
        (firsts,) = np.nonzero(rank == 0)
        return cls(
            torch.from_numpy(shared if rows is None else rows[shared]).to(device),
            tuple(rounds),
            torch.from_numpy(firsts).to(device),
            torch.from_numpy(place[shared[firsts]]).to(device),
        )

    def put(self, gradient: Tensor, grad: Tensor) -> Tensor:
        """Sum `grad` [rows, …] by source row into `gradient` [places, …]; skip source rows that were read once."""
        if not self.rounds:
            return gradient
        many = grad.index_select(0, self.rows)
        for giving, taking in self.rounds:
            many.index_add_(0, taking, many.index_select(0, giving))
        return gradient.index_copy_(0, self.places, many.index_select(0, self.firsts))


@dataclass(frozen=True, slots=True)
class Reading:
    """A differentiable read of rows `index` i64 [N] of `size`; `sums` adds gradients of repeated rows."""

    index: Tensor
    size: int
    sums: Sums

    @classmethod
    def of(cls, place: Indices, size: int, device: torch.device) -> Self:
        """Plan to read the rows `place` [N] of an array with `size` rows."""
        return cls(torch.from_numpy(place).to(device), size, Sums.of(place, device))

    def __call__(self, computed: Tensor) -> Tensor:
        """Read the rows [N, …] from `computed` [K, …]."""
        read: Tensor = _Read.apply(computed, self)
        return read


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, computed: Tensor, reading: Reading) -> Tensor:
        ctx.reading = reading
        return computed.index_select(0, reading.index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        gradient = grad.new_zeros((ctx.reading.size, *grad.shape[1:]))
        # For a row that was read several times, `index_copy_` keeps an arbitrary gradient; `put` then overwrites it
        # with the sum.
        return ctx.reading.sums.put(gradient.index_copy_(0, ctx.reading.index, grad), grad), None
