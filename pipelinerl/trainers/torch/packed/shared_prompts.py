"""What a micro-batch has several times and a model computes once: the prompt that the rollouts of a group begin with.

Under causal attention what a layer makes of a token hangs on the tokens before it alone. So tokens of equal beginnings
have equal hidden states in every layer, and their gradients add up: of G rollouts with one prompt of P tokens, P tokens
are computed instead of G · P. Only attention sees each rollout whole (`segments.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_contract.types import MicroBatch

Indices = NDArray[np.int64]


class Distinct(NamedTuple):
    """The K of a micro-batch's T tokens that are computed.

    Attributes:
        kept: i64 [K], which they are, ascending.
        place: i64 [T], where among the K each of the T tokens is found.
        copy: i64 [T], 0 for what is kept; of equal tokens the later ones count 1, 2, …
    """

    kept: Indices
    place: Indices
    copy: Indices

    @classmethod
    def of(cls, batch: MicroBatch) -> Self:
        """Of equal prompts, the tokens of a segment before its first in the loss mask, the first is kept."""
        tokens, every = batch.token_ids, np.arange(batch.num_tokens)
        starts = np.flatnonzero(batch.position_ids == 0)
        ends = np.append(starts[1:], batch.num_tokens)
        sampled = np.minimum.reduceat(np.where(batch.loss_mask, every, batch.num_tokens), starts)
        source, copy = every.copy(), np.zeros_like(every)
        seen: dict[bytes, list[int]] = {}
        for start, end in zip(starts, np.minimum(sampled, ends), strict=True):
            equals = seen.setdefault(tokens[start:end].tobytes(), [])
            if equals:
                source[start:end] = every[equals[0] : equals[0] + end - start]
                copy[start:end] = len(equals)
            equals.append(int(start))
        kept = source == every
        return cls(np.flatnonzero(kept), (np.cumsum(kept) - 1)[source], copy)

    def with_padding(self, count: int) -> Self:
        """With so many further tokens, all of them computed."""
        added = np.arange(count)
        return type(self)(
            np.append(self.kept, len(self.place) + added),
            np.append(self.place, len(self.kept) + added),
            np.append(self.copy, np.zeros_like(added)),
        )


@final
@dataclass(frozen=True, slots=True)
class Reading:
    """Rows [N, …] read from [K, …] where some are read more than once.

    The way back adds up in rounds, in none of which two rows meet, so that it is deterministic on every device.

    Attributes:
        index: i64 [N].
        size: K.
        rounds: of each the rows, and the place of each.
    """

    index: Tensor
    size: int
    rounds: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def of(cls, distinct: Distinct, tokens: Indices, device: torch.device, own: slice | None = None) -> Self:
        """Read what was computed of these of the T tokens; all of them among the `own` of those that are computed."""
        first, size = (0, len(distinct.kept)) if own is None else (own.start, own.stop - own.start)
        place = distinct.place[tokens] - first
        return cls(torch.from_numpy(place).to(device), size, rounds_of(place, distinct.copy[tokens], device))

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
        return added(found, grad, ctx.reading.rounds), None


def rounds_of(place: Indices, copy: Indices, device: torch.device) -> tuple[tuple[Tensor, Tensor], ...]:
    """For each copy number that occurs, the rows with it and their places, none of which is there twice."""
    rows = [np.flatnonzero(copy == number) for number in np.unique(copy)]
    return tuple((torch.from_numpy(each).to(device), torch.from_numpy(place[each]).to(device)) for each in rows)


def added(found: Tensor, grad: Tensor, rounds: tuple[tuple[Tensor, Tensor], ...]) -> Tensor:
    """`found`, with the rows of `grad` added at their places, round after round."""
    for rows, places in rounds:
        found.index_add_(0, places, grad.index_select(0, rows))
    return found
