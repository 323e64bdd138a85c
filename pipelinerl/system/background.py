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
    begun = threading.Event()
    future = _begin(name, function, begun.set)
    begun.wait()
    return future


def in_background_soon(name: str, function: Callable[[], T]) -> Future[T]:
    """Run `function` like `in_background`, but return the future without waiting for the thread to run."""
    return _begin(name, function, lambda: None)


def _begin(name: str, function: Callable[[], T], begun: Callable[[], None]) -> Future[T]:
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def call() -> None:
        threading.current_thread().name = name
        begun()
        try:
            result = function()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        threading.current_thread().name = "free"

    with _free_guard:
        calls = _free.pop() if _free else None
    if calls is None:
        calls = SimpleQueue()
        threading.Thread(target=_make_calls, args=(calls,), name=name, daemon=True).start()
    calls.put(call)
    return future


def _make_calls(calls: SimpleQueue[Callable[[], None]]) -> None:
    """Make one call after another, until none has come for `_FREE_S` seconds.

    No reference to a finished call is kept, so the call's objects, such as connections, can be freed.
    """
    while True:
        try:
            call = calls.get(timeout=_FREE_S)
        except Empty:
            with _free_guard:
                if calls in _free:
                    _free.remove(calls)
                    return
            call = calls.get()  # another thread has just taken these from `_free`, so a call will follow
        call()
        del call
        with _free_guard:
            _free.append(calls)


def _forget_threads() -> None:
    """Clear the list of idle threads in a forked process, which has no other threads."""
    global _free_guard
    _free_guard = threading.Lock()
    _free.clear()


#: Queues of the calls of idle threads.
_free: list[SimpleQueue[Callable[[], None]]] = []
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
