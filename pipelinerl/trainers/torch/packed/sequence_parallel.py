"""Sequence parallelism (Ulysses, Jacobs et al. 2023, arXiv 2309.14509): n processes compute one micro-batch together.

    all but attention    each has K / n of the tokens that are computed, and all heads
    attention            each has all K tokens, and 1 / n of the heads

Between the two they exchange, all to all. So attention sees segments and shared prompts as one process would, and
nothing of `segments.py` changes. Where there are fewer key heads than processes these are repeated. Predictions are
brought together at the end, since an objective may read a whole rollout; each process then goes back through those of
its own tokens alone, and gradients of weights add up over the n as over any others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl.trainers.torch.mesh import refuse_heads
from pipelinerl.trainers.torch.packed.shared_beginnings import Distinct

dist: Any = torch.distributed


@final
@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The `size` processes that share a micro-batch's tokens; this one is number `place` of them."""

    group: Any
    size: int
    place: int

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From [k, H, d], of this process' tokens, to [K, H / n, d], its heads of all tokens.

        Raises:
            SpecError: H is no multiple of n; on every process alike.
        """
        refuse_heads(query.shape[1], self.size)
        repeats = repeats_of(query.shape[1], key.shape[1], self.size)
        if repeats > 1:
            key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        return self._heads(query), self._heads(key), self._heads(value)

    def to_tokens(self, attended: Tensor) -> Tensor:
        """Inverse of `to_heads`: from [K, H / n, d] to [k, H, d]."""
        parts: Tensor = _Exchange.apply(attended.unflatten(0, (self.size, -1)).contiguous(), self.group)
        return parts.transpose(0, 1).flatten(1, 2)

    def _heads(self, own: Tensor) -> Tensor:
        parts: Tensor = _Exchange.apply(own.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous(), self.group)
        return parts.flatten(0, 1)

    def together(self, own: Tensor, readers: list[NDArray[np.int64]]) -> Tensor:
        """[M, N], the same on every process, of `own` [M, N_own], the columns `readers[place]` of it.

        The way back gives each process the gradient of its own columns: all evaluate the same loss.

        Args:
            readers: of each process the columns that it has; together all of them once.
        """
        whole: Tensor = _Together.apply(own, self, readers)
        return whole


@final
class SequencePart(NamedTuple):
    """What one of the processes computes of a micro-batch.

    Attributes:
        distinct: the tokens that are computed, made a multiple of n by a segment of padding, which nobody reads.
        position_ids: i32 [T + padding].
        own: of the tokens that are computed, those of this process.
        readers: of each process, which of the predictions that are asked for it makes.
    """

    distinct: Distinct
    position_ids: NDArray[np.int32]
    own: slice
    readers: list[NDArray[np.int64]]

    @classmethod
    def of(
        cls, group: SequenceGroup, distinct: Distinct, position_ids: NDArray[np.int32], asked: NDArray[np.int64]
    ) -> SequencePart:
        """Divide evenly; who computes a token makes the prediction that it leads to.

        Args:
            asked: i64 [N], the tokens whose predictions are asked for, none of which begins a segment.
        """
        padding = -len(distinct.kept) % group.size
        padded = distinct.with_padding(padding)
        each = len(padded.kept) // group.size
        makers = padded.place[asked - 1] // each
        return cls(
            padded,
            np.concatenate((position_ids, np.arange(padding, dtype=np.int32))),
            slice(group.place * each, (group.place + 1) * each),
            [np.flatnonzero(makers == place) for place in range(group.size)],
        )


def repeats_of(query_heads: int, key_heads: int, processes: int) -> int:
    """How often each key head is repeated, at least, so that each process has those that its query heads read."""
    shared = query_heads // key_heads
    return next(r for r in range(1, shared + 1) if shared % r == 0 and key_heads * r % processes == 0)


class _Exchange(torch.autograd.Function):
    """[n, …]: part i goes to process i, and comes back the same way."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _exchanged(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchanged(grad.contiguous(), ctx.group), None


def _exchanged(parts: Tensor, group: Any) -> Tensor:
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, group: SequenceGroup, readers: list[NDArray[np.int64]]) -> Tensor:
        columns = [torch.from_numpy(each).to(own.device) for each in readers]
        ctx.own = columns[group.place]
        longest = max(len(each) for each in columns)
        sent = own.new_zeros((own.shape[0], longest))
        sent[:, : own.shape[1]] = own
        received = [torch.empty_like(sent) for _ in columns]
        dist.all_gather(received, sent, group=group.group)
        whole = own.new_empty((own.shape[0], sum(len(each) for each in columns)))
        for each, part in zip(columns, received, strict=True):
            whole[:, each] = part[:, : len(each)]
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(1, ctx.own), None, None
