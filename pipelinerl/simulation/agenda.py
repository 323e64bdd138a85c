"""`Agenda`: the event queue of the simulation. Simultaneous events happen in the order in which they were added.

`SimulatedTrainer` is the trainer's computation, whose speed may change while it runs.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final


@final
@dataclass(slots=True)
class Agenda:
    """The event queue; `now` is the simulated time in seconds."""

    now: float = 0.0
    _events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    _serial: int = 0

    def at(self, time: float, what: Callable[..., None], *arguments: Any) -> None:
        """Schedule the call `what(*arguments)` at `time`, or now if `time` has passed."""
        self._serial += 1
        heapq.heappush(self._events, (time if time > self.now else self.now, self._serial, what, arguments))

    def after(self, seconds: float, what: Callable[..., None], *arguments: Any) -> None:
        """Schedule the call `what(*arguments)` in `seconds`."""
        self.at(self.now + seconds, what, *arguments)

    def step(self) -> bool:
        """Process the next event; return False if there is none."""
        if not self._events:
            return False
        self.now, _, what, arguments = heapq.heappop(self._events)
        what(*arguments)
        return True


@final
@dataclass(slots=True)
class SimulatedTrainer:
    """The trainer's computation: takes `_left_s` more seconds, times `_slowness`, and then calls `done`."""

    agenda: Agenda
    done: Callable[[], None]
    is_computing: bool = False
    _left_s: float = 0.0
    _since: float = 0.0
    _slowness: float = 1.0
    _stamp: int = 0

    def begin(self, seconds: float) -> None:
        """Begin a computation that takes `seconds` if nothing slows it down."""
        self.is_computing, self._left_s = True, seconds
        self._plan()

    def slow(self, factor: float) -> None:
        """Let the computation take `factor` times as long from now on."""
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
