"""`Agenda`: what happens next. Events at one instant happen in the order in which they were put there.

`SimulatedTrainer` is a computation on it that others may slow down while it goes on.
"""

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


@final
@dataclass(slots=True)
class SimulatedTrainer:
    """Takes `left_s` seconds alone, and `slowness` times as long otherwise; then calls `done`."""

    agenda: Agenda
    done: Callable[[], None]
    is_computing: bool = False
    _left_s: float = 0.0
    _since: float = 0.0
    _slowness: float = 1.0
    _stamp: int = 0

    def begin(self, seconds: float) -> None:
        """Compute for so long, if nothing slows it down."""
        self.is_computing, self._left_s = True, seconds
        self._plan()

    def slow(self, factor: float) -> None:
        """From now on it takes `factor` times as long."""
        if factor == self._slowness:
            return
        if self.is_computing:
            self._left_s -= (self.agenda.now - self._since) / self._slowness
        self._slowness = factor
        if self.is_computing:
            self._plan()

    def _plan(self) -> None:
        self._stamp += 1
        self._since = self.agenda.now
        self.agenda.after(self._left_s * self._slowness, self._ended, self._stamp)

    def _ended(self, stamp: int) -> None:
        if stamp == self._stamp:
            self.is_computing = False
            self.done()
