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


def test_concurrent_background_calls_run_in_separate_threads():
    meeting = threading.Barrier(8, timeout=PATIENCE_S)
    calls = [in_background(f"call-{number}", meeting.wait) for number in range(8)]
    assert sorted(call.result(PATIENCE_S) for call in calls) == list(range(8))


def test_exception_in_a_background_call_reaches_the_caller_and_the_thread_survives():
    def fails():
        raise OSError("no")

    for _ in range(3):
        with pytest.raises(OSError, match="no"):
            in_background("fails", fails).result(PATIENCE_S)
    assert in_background("works", lambda: 1).result(PATIENCE_S) == 1


class Refusing:
    """A fake event loop that reports to be open but raises when it gets a callback.

    With `closes`, it raises because it was closed just before; otherwise the reason is another one.
    """

    def __init__(self, *, closes):
        self._closes, self._closed = closes, False

    def is_closed(self):
        return self._closed

    def call_soon_threadsafe(self, *_):
        self._closed = self._closes
        raise RuntimeError("it takes no call")


def test_callback_to_an_event_loop_that_was_just_closed_is_ignored():
    """If the callback raised, the thread would die, and pytest would blame an unrelated test."""
    closing = Refusing(closes=True)
    tell(closing, print)
    closed = asyncio.new_event_loop()
    closed.close()
    tell(closed, print)


def test_runtime_error_of_an_event_loop_that_is_not_closed_is_raised():
    refusing = Refusing(closes=False)
    with pytest.raises(RuntimeError, match="takes no call"):
        tell(refusing, print)


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


async def test_coroutines_run_together_return_their_results_in_order():
    async def after(seconds):
        await asyncio.sleep(seconds)
        return seconds

    assert await run_together(map(after, (0.01, 0.0))) == [0.01, 0.0]


async def test_first_failure_of_coroutines_run_together_cancels_the_others_and_is_the_only_error_raised():
    ended = []

    async def fail():
        raise ValueError("bad")

    async def wait():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("wait")

    with pytest.raises(ValueError, match="bad"):
        await run_together(work() for work in (wait, fail))
    assert ended == ["wait"]
