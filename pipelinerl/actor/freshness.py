"""Cancellation of groups that are too old to be trained, so that engines stop working on them.

A group can be trained in the step after version v iff v + 1 − (version of its oldest token) ≤ k, the trainer's
staleness bound (`staleness.py`). The actor does not know the version of the oldest token. It assumes the first version
reported to it after the request was sent, which is normally at least as new as the true one: if the group is stale by
that version, it is stale in any case. The exception is a request that waited long at a full engine. Its group may be
dropped wrongly, which is rare, because pacing keeps orders from waiting for k steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pipelinerl.staleness import StalenessBounds


def can_be_fresh(began: int, *, current: int, k: float) -> bool:
    """Return True if a group that began at version `began` may be trained in the step after version `current`."""
    return StalenessBounds(1, k).accepts(producing=current + 1, oldest=began)


@dataclass(slots=True, eq=False)
class Held:
    """A group that is being sampled. `scope` is the timeout that cancels the sampling.

    `waits` is True until the group's request is sent to an engine. `began` is the first version that was reported after
    the request was sent; None before such a report.
    `given_up` is the value that `began` had when the group was dropped; None if the group was not dropped.
    """

    scope: asyncio.Timeout
    began: int | None = None
    given_up: int | None = None
    waits: bool = True

    def begin(self) -> None:
        """Record that the group is requested from its first token on; the next reported version becomes `began`."""
        self.began, self.waits = None, False


class Freshness:
    """Registry of the groups being sampled, which cancels those that become too old; used on one event loop."""

    def __init__(self) -> None:
        self._held: set[Held] = set()
        self.current = 0

    @contextmanager
    def watched(self, held: Held) -> Iterator[None]:
        """Watch a group during the `with` block; its timeout `scope` expires once the group is too old to train."""
        self._held.add(held)
        try:
            yield
        finally:
            self._held.discard(held)

    def follow(self, *, current: int, k: float) -> None:
        """Set the trainer's version `current` and staleness bound `k`; cancel groups that are too old to be trained."""
        self.current = current
        for held in self._held:
            if held.waits:
                continue
            if held.began is None:
                held.began = current
            elif held.given_up is None and not can_be_fresh(held.began, current=current, k=k):
                held.given_up = held.began
                held.scope.reschedule(asyncio.get_running_loop().time())
