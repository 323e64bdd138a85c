"""What a micro-batch has several times and a model computes once: the tokens that segments begin with alike.

Under causal attention what a layer makes of a token hangs on the tokens before it alone. So tokens of equal beginnings
have equal hidden states in every layer, and their gradients add up: a system prompt of all groups, the prompt of a
group, and the first words of its answers, as far as they are the same, are computed once each. The segments of a
micro-batch are a tree of tokens, and a pass costs what its nodes cost. Only attention sees each segment whole
(`segments.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_contract.types import MicroBatch

Indices = NDArray[np.int64]

#: Share of the tokens; to lay out what is shared costs about as much as to compute these again.
_LEAST_SAVED: Final = 1 / 32


class Distinct(NamedTuple):
    """The K of a micro-batch's T tokens that are computed: the nodes of the tree.

    Attributes:
        kept: i64 [K], which they are, ascending.
        place: i64 [T], where among the K each of the T tokens is found.
    """

    kept: Indices
    place: Indices

    @classmethod
    def of(cls, batch: MicroBatch) -> Self:
        """Of tokens whose segments are equal up to them, one is kept; all are where that would save too little.

        Where the sampler's experts are replayed, only prompts are looked at: two samplers may have sent equal answers
        to different experts.
        """
        tokens, every = batch.token_ids, np.arange(batch.num_tokens)
        source = every.copy()
        starts = np.flatnonzero(batch.position_ids == 0)
        ends = np.append(starts[1:], batch.num_tokens)
        if batch.routed_experts is not None:
            sampled = np.where(batch.loss_mask, every, batch.num_tokens)
            ends = np.minimum(np.minimum.reduceat(sampled, starts), ends)
        beginnings = [tokens[start:end] for start, end in zip(starts, ends, strict=True)]
        # Those that begin alike lie side by side in any order of their bytes.
        order = sorted(range(len(starts)), key=lambda segment: beginnings[segment].tobytes())
        for before, this in pairwise(order):
            count = _equal(beginnings[before], beginnings[this])
            source[starts[this] : starts[this] + count] = source[starts[before] : starts[before] + count]
        kept = source == every
        if np.count_nonzero(kept) > (1 - _LEAST_SAVED) * batch.num_tokens:
            return cls(every, every)
        return cls(np.flatnonzero(kept), (np.cumsum(kept) - 1)[source])

    def with_padding(self, count: int) -> Self:
        """With so many further tokens, all of them computed."""
        added = np.arange(count)
        return type(self)(np.append(self.kept, len(self.place) + added), np.append(self.place, len(self.kept) + added))


def _equal(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many tokens both begin with."""
    shorter = min(len(one), len(other))
    (differ,) = np.nonzero(one[:shorter] != other[:shorter])
    return int(differ[0]) if len(differ) else shorter


@final
@dataclass(frozen=True, slots=True)
class Sums:
    """Rows that were read from one place, whose gradients add up there.

    They add up in pairs, and pairs of pairs, in none of which rounds two rows meet a third: the order is fixed, so the
    sum is deterministic on every device, and there are as many rounds as doublings.

    Attributes:
        rows: i64 [M], the rows that have others of their place.
        rounds: in each, which of the M are added to which.
        firsts: i64 [U], which of the M hold the sums at last.
        places: i64 [U], where these belong.
    """

    rows: Tensor
    rounds: tuple[tuple[Tensor, Tensor], ...]
    firsts: Tensor
    places: Tensor

    @classmethod
    def of(cls, place: Indices, device: torch.device, rows: Indices | None = None) -> Self:
        """The `rows` [N], by default 0, 1, …, were read from the `place` [N] each."""
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

    def put(self, found: Tensor, grad: Tensor) -> Tensor:
        """`found` [places, …] with the sums of `grad` [rows, …] at their places."""
        if not self.rounds:
            return found
        many = grad.index_select(0, self.rows)
        for giving, taking in self.rounds:
            many.index_add_(0, taking, many.index_select(0, giving))
        return found.index_copy_(0, self.places, many.index_select(0, self.firsts))


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """Rows [N, …] read from [K, …] where some are read more than once.

    Attributes:
        index: i64 [N].
        size: K.
        sums: of what is read more than once.
    """

    index: Tensor
    size: int
    sums: Sums

    @classmethod
    def of(cls, place: Indices, size: int, device: torch.device) -> Self:
        """Read the `place` [N] each, of `size`."""
        return cls(torch.from_numpy(place).to(device), size, Sums.of(place, device))

    def __call__(self, computed: Tensor) -> Tensor:
        """[K, …] → [N, …]."""
        read: Tensor = _Read.apply(computed, self)
        return read


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, computed: Tensor, reading: Reading) -> Tensor:
        ctx.reading = reading
        return computed.index_select(0, reading.index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        found = grad.new_zeros((ctx.reading.size, *grad.shape[1:]))
        # Of a place that is read twice some row is copied, whichever: its sum comes after.
        return ctx.reading.sums.put(found.index_copy_(0, ctx.reading.index, grad), grad), None
