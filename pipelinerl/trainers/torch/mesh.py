"""`ProcessMesh`: the processes of one torch trainer, and which rows of a parameter lie on which.

    dp_replicate   whole copies of the model, among which gradients are summed (DDP)
    dp_shard       processes among which a copy is divided by rows (FSDP); with both it is HSDP
    cp             processes that compute a micro-batch together, each a part of its tokens; they divide rows, too

Neighbours share tokens: process r computes part r // cp of the trainer's `width`, and holds shard r % (dp_shard · cp)
of copy r // (dp_shard · cp).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from trainer_contract.errors import SpecError


class GradientSum(StrEnum):
    """What a process holds of the gradient between the backward passes of a step."""

    WHOLE = "whole"
    """All of it, brought together once, in the last pass: the least that is sent."""
    DIVIDED = "divided"
    """Its own rows, since it is brought together layer by layer in every pass: the least memory."""


class ExpertWeights(StrEnum):
    """Where a layer's experts are while they compute."""

    GATHERED = "gathered"
    """On each process, for its own tokens: gathered like any weight."""
    PARALLEL = "parallel"
    """Where they lie: tokens travel to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMesh:
    """Processes along each axis."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.width * self.cp

    @property
    def width(self) -> int:
        """How many micro-batches are computed at once."""
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        """Among how many processes a copy of the model is divided."""
        return self.dp_shard * self.cp

    def rows_of(self, rank: int, length: int) -> slice:
        """The rows of a parameter of `length` rows that lie on this process, as `fully_shard` divides them."""
        chunk = -(-length // self.shards)
        start = min(rank % self.shards * chunk, length)
        return slice(start, min(start + chunk, length))


def refuse_heads(heads: int, processes: int) -> None:
    """Raise SpecError where attention's heads cannot be divided among so many processes."""
    if heads % processes:
        raise SpecError(
            f"options.mesh.cp={processes}: attention has {heads} heads, which {processes} processes cannot divide; "
            f"set cp to a divisor of {heads}"
        )


def refuse_uneven_experts(experts: int, processes: int) -> None:
    """Raise SpecError where a layer's experts cannot be divided evenly among so many processes."""
    if experts < processes or experts % processes:
        raise SpecError(
            f'options.experts = "parallel": a layer has {experts} experts, which {processes} processes cannot divide; '
            'say "gathered", or divide the model by another options.mesh'
        )
