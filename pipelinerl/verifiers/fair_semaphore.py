"""`FairSemaphore`: a semaphore that prefers groups with the fewest slow questions, then the order of arrival.

A place is the right to let one question run. To avoid starvation, every fourth free place goes out of turn, to the
group that has waited longest. Places given out of turn are limited to a quarter of the total time that places are held,
since slow questions hold a place longer than others.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter, deque
from typing import Final, final

#: The longest waiting group gets at most one in this many of places passed on, of places held at once, and of seconds
#: held.
_TO_THE_OLDEST: Final = 4
#: Factor by which the sums of seconds held decay each time that a place is given back.
_KEPT: Final = 0.98


@final
class FairSemaphore:
    """A limited number of places, each of which lets one question run, handed out by group.

    Args:
        slow_of: number of slow questions per group. It is read when a place becomes free. A group's first slow question
            therefore counts against all waiting questions of the group.
    """

    def __init__(self, free: int, slow_of: Counter[str]) -> None:
        self._free = free
        self._slow_of = slow_of
        self._waiting: dict[str, deque[tuple[int, asyncio.Future[bool]]]] = {}
        self._numbers = itertools.count()
        self._most_out_of_turn = max(1, free // _TO_THE_OLDEST)
        self._in_turn = self._out_of_turn = 0
        self._out_of_turn_s = self._held_s = 0.0

    def take_now(self) -> bool:
        """Take a place if one is free."""
        if self._free == 0:
            return False
        self._free -= 1
        return True

    async def take(self, group: str) -> bool:
        """Wait for a place; return whether it was given out of turn, because the group had waited longest."""
        if self.take_now():
            return False
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(group, deque()).append((next(self._numbers), future))
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give_back(0.0, out_of_turn=future.result())
            raise

    def give_back(self, held_s: float, *, out_of_turn: bool) -> None:
        """Pass the place on to the next waiting question, or free it."""
        self._out_of_turn -= out_of_turn
        self._held_s = _KEPT * self._held_s + held_s
        self._out_of_turn_s = _KEPT * self._out_of_turn_s + held_s * out_of_turn
        while self._waiting:
            oldest = min(self._waiting, key=self._age)
            group = min(self._waiting, key=lambda each: (self._slow_of[each], self._age(each)))
            goes_before = group != oldest and self._oldest_is_due
            if goes_before:
                group = oldest
            queue = self._waiting[group]
            _, future = queue.popleft()
            if not queue:
                del self._waiting[group]
            if not future.done():
                self._out_of_turn += goes_before
                self._in_turn = 0 if goes_before else self._in_turn + 1
                future.set_result(goes_before)
                return
        self._free += 1

    @property
    def _oldest_is_due(self) -> bool:
        few = self._out_of_turn < self._most_out_of_turn and self._in_turn >= _TO_THE_OLDEST - 1
        return few and self._out_of_turn_s * _TO_THE_OLDEST <= self._held_s

    def _age(self, group: str) -> int:
        return self._waiting[group][0][0]
