"""`Agenda`: what happens next. Events at one instant happen in the order in which they were put there."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final


@final
@dataclass(slots=True)
class Agenda:
    """`now` is the simulated time, in seconds."""

    now: float = 0.0
    _events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    _serial: int = 0

    def at(self, time: float, what: Callable[..., None], *arguments: Any) -> None:
        """`what(*arguments)` happens at `time`, or now, if that is over."""
        self._serial += 1
        heapq.heappush(self._events, (time if time > self.now else self.now, self._serial, what, arguments))

    def after(self, seconds: float, what: Callable[..., None], *arguments: Any) -> None:
        """The same, so many seconds from now."""
        self.at(self.now + seconds, what, *arguments)

    def step(self) -> bool:
        """Let the next event happen; False: there is none."""
        if not self._events:
            return False
        self.now, _, what, arguments = heapq.heappop(self._events)
        what(*arguments)
        return True
