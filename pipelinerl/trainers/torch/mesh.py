"""`ProcessMesh`: the processes of one torch trainer, and which rows of a parameter lie on which.

    dp_replicate   whole copies of the model, among which gradients are summed (DDP)
    dp_shard       processes among which a copy is divided by rows (FSDP); with both it is HSDP
    cp             processes that share a rollout's tokens: not built yet, and refused

Process r is part r of the trainer's `width`: copy r // dp_shard, shard r % dp_shard.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMesh:
    """Processes along each axis."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1

    @property
    def size(self) -> int:
        """How many processes there are."""
        return self.dp_replicate * self.dp_shard * self.cp

    def rows_of(self, rank: int, length: int) -> slice:
        """The rows of a parameter of `length` rows that lie on this process, as `fully_shard` divides them."""
        chunk = -(-length // self.dp_shard)
        start = min(rank % self.dp_shard * chunk, length)
        return slice(start, min(start + chunk, length))
