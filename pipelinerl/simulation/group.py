"""`SimulatedGroup`: a prompt order on its way through the system; `WaitingGroups`: the groups ready to train.

The choice among waiting groups follows `training/rollouts/batcher.py`, as a test checks: fresh groups in order of their
oldest version, then of their index. Groups too old for the step are dropped.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import final

from pipelinerl.staleness import StalenessBounds


@final
@dataclass(slots=True, eq=False)
class SimulatedGroup:
    """`size` answers to one prompt. Times are in seconds since the run began."""

    index: int
    size: int
    lengths: list[int]
    issued_at: float
    place: int = -1
    """Number of the engine that samples the group; −1 while none does."""
    started: int = 0
    """Number of answers that have been given a row, including answers that ended before the current request."""
    left: int = 0
    """Number of answers that have not ended."""
    oldest: int = -1
    """The oldest version that sampled one of its tokens; −1 if none."""
    versions: dict[int, int] = field(default_factory=dict)
    """Number of its answers that began with each version."""
    heard: int = -1
    """The first version that the group's actor polled after requesting the group; −1 if none yet."""
    attempts: int = 0

    @property
    def tokens(self) -> int:
        """The number of sampled tokens, once all answers have ended."""
        return sum(self.lengths)


@final
@dataclass(slots=True)
class WaitingGroups:
    """Groups ready to train; `rollouts` is the number of their rollouts, `dropped` lists groups found to be stale, in
    order.
    """

    rollouts: int = 0
    dropped: list[SimulatedGroup] = field(default_factory=list)
    _by_version: dict[int, list[tuple[int, SimulatedGroup]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(map(len, self._by_version.values()))

    def offer(self, group: SimulatedGroup) -> None:
        """Add a group."""
        heapq.heappush(self._by_version.setdefault(group.oldest, []), (group.index, group))
        self.rollouts += group.size

    def take(self, rollouts: int, *, producing: int, bounds: StalenessBounds) -> list[SimulatedGroup] | None:
        """Return the groups of the step that makes version `producing`; None while there are too few fresh groups."""
        for version in [each for each in self._by_version if not bounds.accepts(producing=producing, oldest=each)]:
            stale = [group for _, group in sorted(self._by_version.pop(version), key=lambda each: each[0])]
            self.dropped += stale
            self.rollouts -= sum(group.size for group in stale)
        if self.rollouts < rollouts:
            return None
        chosen: list[SimulatedGroup] = []
        taken = 0
        for version in sorted(self._by_version):
            groups = self._by_version[version]
            while groups and taken < rollouts:
                chosen.append(heapq.heappop(groups)[1])
                taken += chosen[-1].size
            if not groups:
                del self._by_version[version]
            if taken >= rollouts:
                break
        self.rollouts -= taken
        return chosen
