"""Cancellation of groups that can no longer train, so that engines stop working on them.

A group can train the step after version v iff v + 1 − (version of its oldest token) ≤ k (`staleness.py`). Its oldest
token is no newer than the next version that the actor learns of after it sent the request. A group for which even that
version is too old will be stale whenever it ends. A request that waited long at a full engine may be younger than this
estimate. Pacing keeps orders from waiting for k steps, and a wrongly dropped group costs work but never breaks the
ledger.
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
    """A group that is sampled within `scope`; `began` is None until the next version is known.

    `given_up` is the value of `began` for which it was dropped, even if another engine has restarted it meanwhile.
    """

    scope: asyncio.Timeout
    began: int | None = None
    given_up: int | None = None
    waits: bool = True

    def begin(self) -> None:
        """Note that an engine samples the group from its first token now; until the next version it counts as
        newest.
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
        """End the block with a TimeoutError as soon as the group cannot be fresh."""
        self._held.add(held)
        try:
            yield
        finally:
            self._held.discard(held)

    def follow(self, *, current: int, k: float) -> None:
        """Note that the trainer is at version `current` and accepts a staleness of at most `k`."""
        self.current = current
        for held in self._held:
            if held.waits:
                continue
            if held.began is None:
                held.began = current
            elif held.given_up is None and not can_be_fresh(held.began, current=current, k=k):
                held.given_up = held.began
                held.scope.reschedule(asyncio.get_running_loop().time())
