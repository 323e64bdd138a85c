"""`ProcessMesh`, the processes of one torch trainer and their rows of each parameter.

    dp_replicate   whole copies of the model; gradients are summed over them (DDP)
    dp_shard       processes that divide a copy by rows (FSDP); together with dp_replicate this is HSDP
    cp             processes that share a micro-batch, each with a part of its tokens; they also divide rows

Neighbouring processes share a micro-batch: process r works on micro-batch r // cp of each round, and holds shard r %
(dp_shard · cp) of copy r // (dp_shard · cp).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from trainer_contract.errors import SpecError


class GradientSum(StrEnum):
    """The part of the gradient that a process holds between the backward passes of a step."""

    WHOLE = "whole"
    """The whole gradient, reduced once in the last pass: least communication."""
    DIVIDED = "divided"
    """Only the process's own rows, reduced layer by layer in every pass: least memory."""


class ExpertWeights(StrEnum):
    """The place where the experts of a layer are computed."""

    GATHERED = "gathered"
    """Gathered on each process for its own tokens, like any weight."""
    PARALLEL = "parallel"
    """Kept on the process that holds them; tokens are sent there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMesh:
    """The number of processes along each axis."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1

    @property
    def size(self) -> int:
        return self.width * self.cp

    @property
    def width(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def shards(self) -> int:
        return self.dp_shard * self.cp

    def rows_of(self, rank: int, length: int) -> slice:
        """Return the rows that process `rank` holds of a parameter with `length` rows, as `fully_shard` divides it."""
        chunk = -(-length // self.shards)
        start = min(rank % self.shards * chunk, length)
        return slice(start, min(start + chunk, length))


def device_index(rank: int, views: Sequence[int], devices: int, local_rank: int | None) -> int:
    """Return the index of a rank's GPU among those that it sees.

    `pipelinerl run` shows each rank only its own GPU. Ranks that a user starts may see the same GPUs. In this case the
    first rank uses the first GPU, the second rank the second, and so on.

    Args:
        views: for each rank, a number that is equal for ranks of one host with the same visible GPUs.
        devices: the number of GPUs that this rank sees.
        local_rank: LOCAL_RANK, which launchers such as torchrun set; it decides unless only one GPU is visible.

    Raises:
        SpecError: there is no GPU left for this rank.
    """
    if local_rank is None:
        index = views[:rank].count(views[rank])
    elif devices == 1:
        index = 0
    else:
        index = local_rank
    if index >= devices:
        raise SpecError(
            f"rank {rank} is number {index + 1} of the ranks that see the same {devices} GPU(s) of this host; show "
            "each rank its own GPU with CUDA_VISIBLE_DEVICES, or start fewer ranks here"
        )
    return index


def refuse_heads(heads: int, processes: int) -> None:
    """Raise SpecError if the attention heads cannot be divided over this number of processes."""
    if heads % processes:
        raise SpecError(
            f"options.mesh.cp={processes}: attention has {heads} heads, which {processes} processes cannot divide; "
            f"set cp to a divisor of {heads}"
        )


def refuse_uneven_experts(experts: int, processes: int) -> None:
    """Raise SpecError if a layer's experts cannot be divided evenly over this number of processes."""
    if experts < processes or experts % processes:
        raise SpecError(
            f'options.experts = "parallel": a layer has {experts} experts, which {processes} processes cannot divide; '
            'use "gathered", or choose another options.mesh'
        )
