"""Sequence parallelism (Ulysses, Jacobs et al. 2023, arXiv 2309.14509): n processes compute one micro-batch together.

    outside attention    each process has K / n of the computed tokens, and all heads
    inside attention     each process has all K tokens, and 1 / n of the heads

An all-to-all converts one layout to the other, so attention sees the same segments as in a single process. If there are
fewer key heads than processes, key heads are repeated. Predictions are gathered at the end, since an objective may read
a whole rollout. In backward, each process uses only the gradient of its own tokens; weight gradients are summed over
all processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl.trainers.torch.mesh import refuse_heads
from pipelinerl.trainers.torch.packed.shared_beginnings import Distinct

dist: Any = torch.distributed


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """The `size` processes that share a micro-batch's tokens; this process has the index `place`."""

    group: Any
    size: int
    place: int

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Convert [k, H, d], own tokens' heads, to [K, H / n, d], own heads of all tokens. Raises SpecError if n does
        not divide H.
        """
        refuse_heads(query.shape[1], self.size)
        repeats = repeats_of(query.shape[1], key.shape[1], self.size)
        if repeats > 1:
            key, value = (each.repeat_interleave(repeats, dim=1) for each in (key, value))
        return self._heads(query), self._heads(key), self._heads(value)

    def own_heads(self, values: Tensor) -> Tensor:
        """Return the part of `values` [H] that belongs to this process's heads."""
        return values.view(self.size, -1)[self.place]

    def to_tokens(self, attended: Tensor) -> Tensor:
        """Convert [K, H / n, d] to [k, H, d]; the inverse of `to_heads`."""
        parts: Tensor = _Exchange.apply(attended.unflatten(0, (self.size, -1)).contiguous(), self.group)
        return parts.transpose(0, 1).flatten(1, 2)

    def _heads(self, own: Tensor) -> Tensor:
        parts: Tensor = _Exchange.apply(own.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous(), self.group)
        return parts.flatten(0, 1)

    def together(self, own: Tensor, readers: list[NDArray[np.int64]]) -> Tensor:
        """Gather predictions [M, N], M values for each of N tokens, from all processes to every process.

        This process has `own` [M, N_own], the columns `readers[place]`. Backward gives each process the gradient of its
        own columns, since all processes evaluate the same loss.
        """
        whole: Tensor = _Together.apply(own, self, readers)
        return whole


class SequencePart(NamedTuple):
    """The part of a micro-batch that one of n processes computes.

    Attributes:
        distinct: the computed tokens of the whole micro-batch, padded with dummy tokens to a multiple of n. The results
            of dummy tokens are never read.
        position_ids: i32 [T + padding].
        own: this process's share of the computed tokens.
        readers: for each process, which of the requested predictions it computes, as indices.
    """

    distinct: Distinct
    position_ids: NDArray[np.int32]
    own: slice
    readers: list[NDArray[np.int64]]

    @classmethod
    def of(
        cls, group: SequenceGroup, distinct: Distinct, position_ids: NDArray[np.int32], requested: NDArray[np.int64]
    ) -> SequencePart:
        """Divide the computed tokens evenly; who computes the token before a `requested` [N] token also predicts it."""
        padding = -len(distinct.kept) % group.size
        padded = distinct.with_padding(padding)
        each = len(padded.kept) // group.size
        makers = padded.place[requested - 1] // each
        return cls(
            padded,
            np.concatenate((position_ids, np.arange(padding, dtype=np.int32))),
            slice(group.place * each, (group.place + 1) * each),
            [np.flatnonzero(makers == place) for place in range(group.size)],
        )


def repeats_of(query_heads: int, key_heads: int, processes: int) -> int:
    """Return the smallest number of copies of each key head with which all processes get equally many key heads."""
    shared = query_heads // key_heads
    return next(r for r in range(1, shared + 1) if shared % r == 0 and key_heads * r % processes == 0)


class _Exchange(torch.autograd.Function):
    """All-to-all of [n, …]: part i is sent to process i; backward sends the gradients back."""

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
