"""`SimulatedTrainer`: a computation that others may slow down while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from pipelinerl.simulation.agenda import Agenda


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
