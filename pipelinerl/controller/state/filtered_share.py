"""`FilteredShare`: which part of the orders ends without training anything, as the last steps have shown it. Pure.

Pacing counts the orders that are out as those that are likely to train (`expected`), so that a dynamic filter (DAPO
§3.2) does not leave the trainer waiting for a second and a third round of prompts at every step. Orders count less the
older they are: half as much after `HALF_LIFE` others. At first nothing is taken to be filtered.
"""

from __future__ import annotations

from typing import Final, final

import msgspec

#: Orders.
HALF_LIFE: Final = 128.0
#: The weight, in orders, of the assumption that nothing is filtered.
PRIOR: Final = 8.0


@final
class FilteredShare(msgspec.Struct, kw_only=True):
    """Weighted counts of the orders that trained and of those that were filtered."""

    trained: float = 0.0
    filtered: float = 0.0

    @property
    def share(self) -> float:
        """Of the orders to come, what will probably be filtered; below 1."""
        return self.filtered / (self.trained + self.filtered + PRIOR)

    def note_step(self, *, trained: int, filtered: int) -> None:
        """A step was taken, and since the one before so many orders have trained and were filtered."""
        kept = 0.5 ** ((trained + filtered) / HALF_LIFE)
        self.trained = self.trained * kept + trained
        self.filtered = self.filtered * kept + filtered

    def expected(self, orders: int, *, waiting: int, most: float) -> int:
        """How many of so many orders will probably train, where at most `most` are issued for each that does.

        Of them, `waiting` have passed the filter already.
        """
        passed = min(waiting, orders)
        return passed + int((orders - passed) * max(1.0 - self.share, 1.0 / most))
