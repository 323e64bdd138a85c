"""`SimulatedGroup`: an order on its way from the controller to its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final


@final
@dataclass(slots=True, eq=False)
class SimulatedGroup:
    """`size` answers to one prompt; times in seconds since the run began."""

    index: int
    size: int
    lengths: list[int]
    issued_at: float
    place: int = -1
    """The engine that samples it; −1 before."""
    started: int = 0
    """Answers that have been given a row, of those that the engine was asked for."""
    left: int = 0
    """Answers that have not ended."""
    oldest: int = -1
    """The oldest version that has sampled one of its tokens; −1: none has."""
    versions: dict[int, int] = field(default_factory=dict)
    """How many of its answers have begun with each version."""
    attempts: int = 0
    given_up: bool = False

    @property
    def tokens(self) -> int:
        """Sampled, once all answers have ended."""
        return sum(self.lengths)
