"""`GroupLimiter`: how many orders an actor may hold; the limit may change while it is in use."""

from __future__ import annotations

import asyncio
from typing import final


@final
class GroupLimiter:
    """Places, counted. For one event loop; one task takes, any task gives back."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._freed = asyncio.Event()

    async def take(self, most: int | None = None) -> int:
        """Take every free place, at most `most`, waiting for the first; returns how many."""
        while self._taken >= self._limit:
            self._freed.clear()
            await self._freed.wait()
        free = self._limit - self._taken
        taken = free if most is None else min(free, most)
        self._taken += taken
        return taken

    def give_back(self, places: int = 1) -> None:
        """Somebody else may take them."""
        self._taken -= places
        self._freed.set()

    def resize(self, limit: int) -> None:
        """From now on so many; who holds more than a lower limit allows keeps it until it is given back."""
        self._limit = limit
        self._freed.set()
