"""What a thread has to say reaches its event loop, and hurts nobody when that has just ended."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from pipelinerl.system.background import tell
from tests.patience import PATIENCE_S


async def test_what_a_thread_tells_is_called_on_the_loop() -> None:
    heard: asyncio.Future[tuple[str, int]] = asyncio.get_running_loop().create_future()
    threading.Thread(target=tell, args=(asyncio.get_running_loop(), heard.set_result, ("yes", 1))).start()
    assert await asyncio.wait_for(heard, PATIENCE_S) == ("yes", 1)


class Refusing:
    """A loop that looks open and refuses a call: because it closes in that moment, or for another reason."""

    def __init__(self, *, closes: bool) -> None:
        self._closes, self._closed = closes, False

    def is_closed(self) -> bool:
        return self._closed

    def call_soon_threadsafe(self, *_: object) -> None:
        self._closed = self._closes
        raise RuntimeError("it takes no call")


def test_a_loop_that_closes_in_that_moment_is_told_nothing() -> None:
    """Else the thread would die of it; in a test, at the cost of the one that runs by then."""
    closing: Any = Refusing(closes=True)
    tell(closing, print)
    closed = asyncio.new_event_loop()
    closed.close()
    tell(closed, print)


def test_any_other_refusal_is_raised() -> None:
    refusing: Any = Refusing(closes=False)
    with pytest.raises(RuntimeError, match="takes no call"):
        tell(refusing, print)
