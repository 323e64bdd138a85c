"""Blocking calls in daemon threads, and their results in an event loop.

`in_background` runs a blocking call (rendezvous, collective, disk) in a daemon thread; `tell` schedules a callback in
the event loop; `to_its_end` completes work even if the caller is cancelled; `run_together` and `cancel_all` run and end
several tasks.

There are as many threads as concurrent calls, and an idle thread is reused. A shared executor would have only a few
threads, each of which could be occupied by a hanging call until its deadline, and the interpreter would wait at exit.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeVar

T = TypeVar("T")

#: Seconds for which an idle thread waits for another call. Most steps are shorter, so each step's weight update reuses
#: the threads of the previous one.
_FREE_S: Final = 20.0


def in_background(name: str, function: Callable[[], T]) -> Future[T]:
    """Run `function` in a daemon thread; as soon as the thread is running, return the future of its result.

    An exception that is never retrieved from the future is dropped silently.
    """
    call = _Call(name, function, Future(), begun := threading.Event())
    call.begin()
    begun.wait()
    return call.future


def in_background_soon(name: str, function: Callable[[], T]) -> Future[T]:
    """Run `function` like `in_background`, but return the future without waiting for the thread to run."""
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
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class _Thread:
    """A thread that makes one call after another, and ends after `_FREE_S` seconds without a call.

    It keeps no reference to a finished call, so the call's objects, such as connections, can be freed.
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
            call = self.calls.get()  # another thread has just taken this one from `_free`, so a call will follow
        threading.current_thread().name = call.name
        call.make()
        threading.current_thread().name = "free"
        return True


def _forget_threads() -> None:
    """Clear the list of idle threads in a forked process, which has no other threads."""
    global _free_guard
    _free_guard = threading.Lock()
    _free.clear()


_free: list[_Thread] = []
_free_guard = threading.Lock()
os.register_at_fork(after_in_child=_forget_threads)


def tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: object) -> None:
    """Schedule `callback` on `loop` from any thread; no-op if the loop is closed."""
    try:
        loop.call_soon_threadsafe(callback, *arguments)
    except RuntimeError:
        if not loop.is_closed():
            raise


async def to_its_end(work: Awaitable[T]) -> T:
    """Return the result of `work`. If the caller is cancelled, wait until `work` ends, then raise `CancelledError`."""
    end = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(end)
    except asyncio.CancelledError:
        await end
        raise


def raise_if_cancelled(error: BaseException) -> None:
    """Raise `error` if it is the cancellation of the current task, not a `CancelledError` that user code raised."""
    task = asyncio.current_task()
    if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
        raise error


async def run_together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results in order. The first failure cancels the rest and is raised alone, not in an ExceptionGroup."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks, and wait until they have ended; their results and errors are dropped."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def settled(future: Future[Any], *, timeout_s: float) -> bool:
    """Wait until `future` is done, or for `timeout_s`; return True if it is done. Its result is not retrieved.

    This takes half the event-loop iterations of `asyncio.wrap_future`; engines wait here during each weight update.
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
