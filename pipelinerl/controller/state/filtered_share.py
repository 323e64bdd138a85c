"""`FilteredShare`: the share of prompt orders that end without training anything, estimated from recent steps. Pure.

Pacing counts an order in flight only by its probability to train (`expected`). If it counted the whole order, a dynamic
filter (DAPO §3.2) would make the trainer wait for a second and a third round of prompts at every step. Counts decay
with a half-life of `HALF_LIFE` orders. The initial estimate is that nothing is filtered.
"""

from __future__ import annotations

from typing import Final, final

import msgspec

#: Half-life of the counts, in orders.
HALF_LIFE: Final = 128.0
#: Weight of the initial estimate that nothing is filtered, in orders.
PRIOR: Final = 8.0


@final
class FilteredShare(msgspec.Struct, kw_only=True):
    """Decayed counts of orders that trained and of orders that were filtered."""

    trained: float = 0.0
    filtered: float = 0.0

    @property
    def share(self) -> float:
        """The expected share of future orders that will be filtered; below 1."""
        return self.filtered / (self.trained + self.filtered + PRIOR)

    def note_step(self, *, trained: int, filtered: int) -> None:
        """Decay the counts, and add the numbers of orders that trained and were filtered in the newest step."""
        kept = 0.5 ** ((trained + filtered) / HALF_LIFE)
        self.trained = self.trained * kept + trained
        self.filtered = self.filtered * kept + filtered

    def expected(self, orders: int, *, waiting: int, most: float) -> int:
        """Return how many of `orders` orders are expected to train.

        `waiting` of these orders have passed the filter already. `most` limits the correction: at most this many orders
        are issued for each order that trains.
        """
        passed = min(waiting, orders)
        return passed + int((orders - passed) * max(1.0 - self.share, 1.0 / most))
