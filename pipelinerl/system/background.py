"""`in_background`: a blocking call (rendezvous, collective, disk) on a daemon thread of its own; `tell`: the way back.
`to_its_end`: what has to be done whoever is cancelled.

A shared executor would do for the work but not for its failures: a call that waits out its deadline would hold one of
a few slots, and the interpreter's exit would wait for it. There are as many threads as calls under way; one that has
made its call makes another if it comes soon, since to start a thread may cost what a weight update may not.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar, final

T = TypeVar("T")

#: Longer than most steps take: their updates find the threads of the one before.
_FREE_S: Final = 20.0


def in_background(name: str, function: Callable[[], T]) -> Future[T]:
    """Run `function` on a daemon thread that does nothing else meanwhile; the future carries its result or exception.

    It has begun when this returns, as far as that can be said of a thread.
    An exception nobody asks for is dropped in silence: whoever starts the call decides who must hear of it.
    """
    call = _Call(name, function, Future(), begun := threading.Event())
    call.begin()
    begun.wait()
    return call.future


def in_background_soon(name: str, function: Callable[[], T]) -> Future[T]:
    """What `in_background` does, but that it may begin after this has returned: the caller waits for no thread."""
    call = _Call(name, function, Future())
    call.begin()
    return call.future


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    function: Callable[[], Any]
    future: Future[Any]
    begun: threading.Event | None = None

    def begin(self) -> None:
        self.future.set_running_or_notify_cancel()
        with _free_guard:
            thread = _free.pop() if _free else None
        if thread is None:
            _Thread().begin(self)
        else:
            thread.calls.put(self)

    def make(self) -> None:
        if self.begun is not None:
            self.begun.set()
        try:
            result = self.function()
        except BaseException as error:  # handed to the waiter, whatever it is
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


@final
class _Thread:
    """A thread that makes one call after another, and ends when it was given none for `_FREE_S`.

    It holds nothing of a call that it has made: what that had, such as connections, goes with whoever asked for it.
    """

    def __init__(self) -> None:
        self.calls: SimpleQueue[_Call] = SimpleQueue()

    def begin(self, call: _Call) -> None:
        self.calls.put(call)
        threading.Thread(target=self._run, name=call.name, daemon=True).start()

    def _run(self) -> None:
        while self._makes_one():
            with _free_guard:
                _free.append(self)

    def _makes_one(self) -> bool:
        try:
            call = self.calls.get(timeout=_FREE_S)
        except Empty:
            with _free_guard:
                if self in _free:
                    _free.remove(self)
                    return False
            call = self.calls.get()  # somebody has just chosen this thread
        threading.current_thread().name = call.name
        call.make()
        threading.current_thread().name = "free"
        return True


def _forget_threads() -> None:
    """In a process that was forked, which has none of them."""
    global _free_guard
    _free_guard = threading.Lock()
    _free.clear()


_free: list[_Thread] = []
_free_guard = threading.Lock()
os.register_at_fork(after_in_child=_forget_threads)


def tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object) -> None:
    """Call `callback` soon on `loop`, from any thread; a no-op once the loop is closed, which may be at any moment."""
    try:
        loop.call_soon_threadsafe(callback, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise


async def to_its_end(work: Awaitable[T]) -> T:
    """The result of `work`; who is cancelled meanwhile waits for it nevertheless, and is cancelled then."""
    end = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(end)
    except asyncio.CancelledError:
        await end
        raise


async def settled(future: Future[Any], *, timeout_s: float) -> bool:
    """Wait until `future` has a result or an exception, which stays with the future; False after `timeout_s`.

    It takes half the turns of the event loop that `asyncio.wrap_future` takes: an engine waits so in each update.
    """
    if future.done():
        return True
    loop = asyncio.get_running_loop()
    over: asyncio.Future[None] = loop.create_future()
    future.add_done_callback(lambda _: tell(loop, _end, over))
    late = loop.call_later(timeout_s, _end, over)
    try:
        await over
    finally:
        late.cancel()
    return future.done()


def _end(wait: asyncio.Future[None]) -> None:
    if not wait.done():
        wait.set_result(None)
