"""Cancellation of groups that can no longer train, so that engines stop working on them.

A group can train the step after version v iff v + 1 − (version of its oldest token) ≤ k (`staleness.py`). The actor
does not know the version of the oldest token. In its place it uses the first version that it learns of after sending
the request, which is normally at least as new. A group for which even that version is too old will be stale whenever it
ends. A request that waited long at a full engine may be younger than this estimate, so its group may be dropped
wrongly. That is rare, because pacing keeps orders from waiting for k steps. It costs work but never breaks the ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from pipelinerl.staleness import StalenessBounds


def can_be_fresh(began: int, *, current: int, k: float) -> bool:
    """Return whether a group whose sampling began at version `began` may train the step after version `current`."""
    return StalenessBounds(1, k).accepts(producing=current + 1, oldest=began)


@final
@dataclass(slots=True, eq=False)
class Held:
    """A group that is being sampled. Its `scope` is the timeout that cancels the sampling.

    `began` is the version at which sampling began, as far as the actor knows; None until the next version is known.
    `given_up` is the value of `began` for which the group was dropped; it stays if another engine has restarted the
    group meanwhile.
    """

    scope: asyncio.Timeout
    began: int | None = None
    given_up: int | None = None
    waits: bool = True

    def begin(self) -> None:
        """Record that an engine samples the group from its first token now. The next version that the actor learns of
        becomes `began`.
        """
        self.began, self.waits = None, False


@final
class Freshness:
    """The groups that are being sampled, on one event loop."""

    def __init__(self) -> None:
        self._held: set[Held] = set()
        self.current = 0

    @contextmanager
    def watched(self, held: Held) -> Iterator[None]:
        """Watch a group during the block, which ends with a TimeoutError as soon as the group is too old to train."""
        self._held.add(held)
        try:
            yield
        finally:
            self._held.discard(held)

    def follow(self, *, current: int, k: float) -> None:
        """Take over the trainer's version `current` and staleness bound `k`; cancel groups that are too old to
        train.
        """
        self.current = current
        for held in self._held:
            if held.waits:
                continue
            if held.began is None:
                held.began = current
            elif held.given_up is None and not can_be_fresh(held.began, current=current, k=k):
                held.given_up = held.began
                held.scope.reschedule(asyncio.get_running_loop().time())
