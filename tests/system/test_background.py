"""Background threads pass their results to the event loop; coroutines run together end together."""

import asyncio
import threading
import time
import weakref

import pytest

from pipelinerl.system.background import in_background, run_together, tell, to_its_end
from tests.patience import PATIENCE_S


async def test_callback_from_a_background_thread_runs_on_the_event_loop():
    received = asyncio.get_running_loop().create_future()
    threading.Thread(target=tell, args=(asyncio.get_running_loop(), received.set_result, ("yes", 1))).start()
    assert await asyncio.wait_for(received, PATIENCE_S) == ("yes", 1)


def test_reused_background_thread_keeps_no_reference_to_its_previous_call():
    class Held:
        pass

    def first():
        held = Held()
        return threading.get_ident(), weakref.ref(held)

    threads, deadline = set[int](), time.monotonic() + PATIENCE_S
    while True:
        thread, held = in_background("call", first).result(PATIENCE_S)
        if thread in threads:
            break
        threads.add(thread)
        assert time.monotonic() < deadline
    while held() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_exception_in_a_background_call_reaches_the_caller_and_the_thread_survives():
    def fails():
        raise OSError("no")

    for _ in range(3):
        with pytest.raises(OSError, match="no"):
            in_background("fails", fails).result(PATIENCE_S)
    assert in_background("works", lambda: 1).result(PATIENCE_S) == 1


class Closing:
    """A fake event loop that is closed while it gets a callback, or raises for another reason."""

    def __init__(self, *, closes):
        self.is_closed = lambda: closes

    def call_soon_threadsafe(self, *_):
        raise RuntimeError("it takes no call")


def test_callback_to_an_event_loop_that_was_just_closed_is_ignored():
    """If the callback raised, the thread would die, and pytest would blame an unrelated test."""
    tell(Closing(closes=True), print)
    with pytest.raises(RuntimeError, match="takes no call"):
        tell(Closing(closes=False), print)
    closed = asyncio.new_event_loop()
    closed.close()
    tell(closed, print)


async def test_cancelled_caller_waits_until_the_work_that_it_started_has_ended():
    gate, ended = asyncio.Event(), []

    async def work():
        await gate.wait()
        ended.append(True)
        return "done"

    waiting = asyncio.create_task(to_its_end(work()))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ended and await to_its_end(work()) == "done"


async def test_first_failure_of_coroutines_run_together_cancels_the_others_and_is_the_only_error_raised():
    ended = []

    async def fail():
        raise ValueError("bad")

    async def wait():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("wait")

    async def after(seconds):
        await asyncio.sleep(seconds)
        return seconds

    assert await run_together(map(after, (0.01, 0.0))) == [0.01, 0.0], "results are in order"
    with pytest.raises(ValueError, match="bad"):
        await run_together(work() for work in (wait, fail))
    assert ended == ["wait"]
