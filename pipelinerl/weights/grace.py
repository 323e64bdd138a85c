"""`Grace`: how long a publication waits for an engine that is later than others, measured from earlier publications.

While one engine is silent, no engine gets weights and the trainer cannot change its own. So once another engine has
answered, an engine is late after three times its usual time for the same request, at least `floor_s` seconds. The floor
falls with the number of engines: the more engines wait, the less one of them is worth the wait.

An engine without history has no limit but the request's own timeout: its first update allocates buffers and imports
libraries. An engine that was late gets three times as much time at its next request, so a slow one is served at last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

from inference_contract.weights import OnUpdate
from pipelinerl.errors import EngineUnreachable
from pipelinerl.weights.engine_control import Failure, guarded

T = TypeVar("T")

_TIMES: Final = 3.0
_LONGEST_FLOOR_S: Final = 2.0
_SHORTEST_FLOOR_S: Final = 0.5
#: The usual time is the longest recent one: each publication lets the longest time fade by this factor.
_FADES: Final = 0.9
#: Time in seconds for answers that have arrived but were not processed yet, because this process was busy.
_MOMENT_S: Final = 0.05


def floor_s(engines: int) -> float:
    """Return the shortest grace in seconds: 2 s for two engines, falling to 0.5 s for eight or more."""
    return max(2 * _LONGEST_FLOOR_S / max(engines, 2), _SHORTEST_FLOOR_S)


def update_kind(on_update: OnUpdate) -> str:
    """Return the kind of request that an engine's whole update is: with drain, it takes as long as the answers."""
    return "an update with drain" if on_update is OnUpdate.DRAIN else "an update"


class Grace:
    """The usual seconds of each engine (base URL) for each kind of request, as one publisher has seen them."""

    def __init__(self) -> None:
        self._usual: dict[tuple[str, str], float] = {}

    def note(self, what: str, url: str, seconds: float) -> None:
        self._usual[what, url] = max(seconds, _FADES * self._usual.get((what, url), 0.0))

    def of(self, what: str, urls: Iterable[str], *, engines: int, most_s: float) -> float:
        """Return the seconds that `what` may take the slowest of `urls`; `most_s` if one of them has no history."""
        limits = [self._limit(what, url, engines) for url in urls]
        return min(most_s, max((most_s if limit is None else limit for limit in limits), default=most_s))

    @asynccontextmanager
    async def within(self, what: str, url: str, *, engines: int, most_s: float) -> AsyncIterator[None]:
        """Limit and measure the body, a request to one engine. Raises TimeoutError with the limit."""
        began, limit_s = time.monotonic(), self.of(what, [url], engines=engines, most_s=most_s)
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            self.was_late(what, url, limit_s)
            raise TimeoutError(f"within {limit_s:.3g} s") from None
        self.note(what, url, time.monotonic() - began)

    async def each(
        self, what: str, urls: Iterable[str], call: Callable[[str], Awaitable[T]], *, engines: int, others: bool = False
    ) -> dict[str, T | Failure]:
        """Call all engines concurrently; return results or exceptions by URL, an `EngineUnreachable` for a late one.
        `engines` is their number in the publication; `others` is True if engines that are not called here have
        answered.
        """
        listed = list(urls)
        answered: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        if others:
            answered.set_result(time.monotonic())

        async def one(url: str) -> T | Failure:
            task = asyncio.ensure_future(guarded(call, url))
            began, limit = time.monotonic(), self._limit(what, url, engines)
            either: list[asyncio.Future[Any]] = [task, answered]
            try:
                if limit is not None:
                    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if limit is not None and not task.done():
                    ends = max(began + limit, answered.result() + floor_s(engines))
                    await asyncio.wait({task}, timeout=ends - time.monotonic())
                    await asyncio.wait({task}, timeout=_MOMENT_S)
                    if not task.done():
                        return self.late(what, url, time.monotonic() - began)
                answer = await task
            finally:
                task.cancel()
            if not isinstance(answer, Exception):
                self.note(what, url, time.monotonic() - began)
                if not answered.done():
                    answered.set_result(time.monotonic())
            return answer

        return dict(zip(listed, await asyncio.gather(*map(one, listed)), strict=True))

    def forget(self, url: str) -> None:
        self._usual = {key: usual for key, usual in self._usual.items() if key[1] != url}

    def was_late(self, what: str, url: str, waited_s: float) -> None:
        """Record that the engine did not answer `what` in time, so that it gets more time at the next request."""
        self._usual[what, url] = max(waited_s, self._usual.get((what, url), 0.0))

    def late(self, what: str, url: str, waited_s: float) -> EngineUnreachable:
        """Record that the engine did not answer `what` in time; return the error that says so."""
        usual = self._usual.get((what, url), 0.0)
        self.was_late(what, url, waited_s)
        return EngineUnreachable(
            f"it did not answer {what} within {waited_s:.1f} s (it usually takes {usual:.2f} s); the others went on "
            "without it"
        )

    def _limit(self, what: str, url: str, engines: int) -> float | None:
        usual = self._usual.get((what, url))
        return None if usual is None or engines < 2 else max(_TIMES * usual, floor_s(engines))
