"""`Freshness`: gives up groups that can train no step any more, so that their places at the engine are free at once.

A group trains the step after version v iff v + 1 − (version of its oldest token) ≤ k (`staleness.py`). Its oldest token
is no newer than the version of which the actor hears next after it sent the request: a group for which even that is
too old is stale whenever it ends. (One that waited long at a full engine may be younger than it seems. Pacing keeps
orders from waiting for as many as k steps, and one given up by mistake costs a group, never the account.)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from pipelinerl.staleness import StalenessBounds


def can_be_fresh(began: int, *, current: int, k: float) -> bool:
    """May a group whose sampling began at version `began` train the step after version `current`?"""
    return StalenessBounds(1, k).accepts(producing=current + 1, oldest=began)


@final
@dataclass(slots=True, eq=False)
class Held:
    """A group that is being sampled within `scope`; `began` is None until the next version is heard of.

    `given_up` is the version of `began` for which it was, even if another engine has begun it meanwhile.
    """

    scope: asyncio.Timeout
    began: int | None = None
    given_up: int | None = None
    waits: bool = True

    def begin(self) -> None:
        """An engine samples it from its first token on, now; until then it is as young as can be."""
        self.began, self.waits = None, False


@final
class Freshness:
    """The groups that are being sampled, on one event loop."""

    def __init__(self) -> None:
        self._held: set[Held] = set()
        self.current = 0

    @contextmanager
    def watched(self, held: Held) -> Iterator[None]:
        """What runs within its scope ends with a TimeoutError as soon as it cannot be fresh."""
        self._held.add(held)
        try:
            yield
        finally:
            self._held.discard(held)

    def follow(self, *, current: int, k: float) -> None:
        """The trainer is at version `current`, and accepts what is at most `k` old."""
        self.current = current
        for held in self._held:
            if held.waits:
                continue
            if held.began is None:
                held.began = current
            elif held.given_up is None and not can_be_fresh(held.began, current=current, k=k):
                held.given_up = held.began
                held.scope.reschedule(asyncio.get_running_loop().time())
