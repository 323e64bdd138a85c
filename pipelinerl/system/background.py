"""`in_background`: a blocking call (rendezvous, collective, disk) on a daemon thread of its own; `tell`: the way back.

A shared executor would do for the work but not for its failures: a call that waits out its deadline would hold one of
a few slots, and the interpreter's exit would wait for it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def in_background(name: str, function: Callable[[], T]) -> Future[T]:
    """Run `function` on a new daemon thread; the future carries its result or exception.

    An exception nobody asks for is dropped in silence: whoever starts the call decides who must hear of it.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def body() -> None:
        try:
            result = function()
        except BaseException as error:  # handed to the waiter, whatever it is
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=body, name=name, daemon=True).start()
    return future


def tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object) -> None:
    """Call `callback` soon on `loop`, from any thread; a no-op once the loop is closed, which may be at any moment."""
    try:
        loop.call_soon_threadsafe(callback, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise


async def settled(future: Future[Any], *, timeout_s: float) -> bool:
    """Wait until `future` has a result or an exception, which stays with the future; False after `timeout_s`."""
    waiter = asyncio.wrap_future(future)
    try:
        await asyncio.wait({waiter}, timeout=timeout_s)
        return waiter.done()
    finally:
        if waiter.done():
            waiter.exception()
        else:
            waiter.cancel()
