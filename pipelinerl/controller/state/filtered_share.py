"""`FilteredShare`: the share of orders that end without training anything, estimated from recent steps. Pure.

Pacing counts an order in flight by its probability to train (`expected`). Otherwise a dynamic filter (DAPO §3.2) would
make the trainer wait for a second and a third round of prompts at every step. Counts decay with a half-life of
`HALF_LIFE` orders. The initial estimate is that nothing is filtered.
"""

from __future__ import annotations

from typing import Final, final

import msgspec

#: Half-life of the counts, in orders.
HALF_LIFE: Final = 128.0
#: The weight, in orders, of the prior that nothing is filtered.
PRIOR: Final = 8.0


@final
class FilteredShare(msgspec.Struct, kw_only=True):
    """Decayed counts of orders that trained and of orders that were filtered."""

    trained: float = 0.0
    filtered: float = 0.0

    @property
    def share(self) -> float:
        """The expected filtered share of future orders; below 1."""
        return self.filtered / (self.trained + self.filtered + PRIOR)

    def note_step(self, *, trained: int, filtered: int) -> None:
        """Decay the counts and add the orders that trained and were filtered since the previous step."""
        kept = 0.5 ** ((trained + filtered) / HALF_LIFE)
        self.trained = self.trained * kept + trained
        self.filtered = self.filtered * kept + filtered

    def expected(self, orders: int, *, waiting: int, most: float) -> int:
        """Return how many of `orders` are expected to train, given at most `most` issued orders per trained one.

        `waiting` of them have passed the filter already.
        """
        passed = min(waiting, orders)
        return passed + int((orders - passed) * max(1.0 - self.share, 1.0 / most))
