"""`/api/stream`: events of a run as server-sent events, for a limited number of listeners.

A listener sleeps until the feed's bell rings. A slow listener costs only its connection and its place in the feed. A
reconnecting listener sends its place as `Last-Event-ID`. The feed encodes each event once for all listeners. FastAPI's
own event generators are not used: they build a model per listener and event, and raise an error when a client
disconnects within an event.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Annotated, Final

from fastapi import Depends, FastAPI, Header
from fastapi.responses import Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from pipelinerl.commands.watch.feed import FeedEntry, frame, summarised
from pipelinerl.commands.watch.pages import STATE_S, Pages, RunNumber

#: Maximum number of pages that may listen at the same time.
SEATS: Final = 32
#: Seconds without data after which a comment is sent, because proxies close silent connections.
_SILENCE_S: Final = 15.0


def add_stream(app: FastAPI, pages: Pages) -> None:
    """Add the route to `app`."""
    seats = asyncio.BoundedSemaphore(SEATS)

    async def seat(number: RunNumber = 0) -> AsyncIterator[None]:
        pages.of(number)  # checked before the response begins, so that an error still gets its own status
        if seats.locked():
            raise HTTPException(503, f"{SEATS} pages are listening already; close one of them")
        async with seats:
            yield

    @app.get("/api/stream", dependencies=[Depends(seat)])
    async def stream(number: RunNumber = 0, last_event_id: Annotated[str, Header(max_length=64)] = "") -> Response:
        # This header tells nginx not to buffer events.
        return EventSourceResponse(_stream_frames(pages, number, last_event_id), headers={"x-accel-buffering": "no"})


async def _stream_frames(pages: Pages, number: int, last_event_id: str) -> AsyncIterator[bytes]:
    """Yield frames of server-sent events as they arrive, until the client disconnects."""
    run = pages.of(number).run
    with run.feed.listener() as bell:
        place, sent_at = run.feed.place, time.monotonic()
        loaded = {"events", "samples"} <= run.loaded
        hello = {"cursor": place, "step": run.view.step, "run": number, "state": run.state, "loaded": loaded}
        yield frame("hello", hello, place)
        if last_event_id and run.feed.after(last_event_id) is None:
            yield _behind(0, run.view.step, number, place)
        elif last_event_id:
            place = last_event_id
        while True:
            bell.clear()
            if pages.states_are_old:
                await run_in_threadpool(pages.note_states)
            entries = run.feed.after(place)
            if entries is None:
                place = run.feed.place
                yield _behind(0, run.view.step, number, place)
            elif entries:
                yield _frames(entries, number)
                place, sent_at = entries[-1].place, time.monotonic()
            elif time.monotonic() - sent_at >= _SILENCE_S:
                yield KEEPALIVE_COMMENT
                sent_at = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(STATE_S):
                    await bell.wait()


def _frames(entries: Sequence[FeedEntry], run: int) -> bytes:
    """Return the entries as frames of server-sent events; too many steps are replaced by one notice."""
    many = summarised(entries)
    if many is None:
        return b"".join(entry.frame for entry in entries)
    others = [entry.frame for entry in entries if entry.step is None]
    return b"".join([*others, _behind(*many, run, entries[-1].place)])


def _behind(first: int, last: int, run: int, place: str) -> bytes:
    return frame("behind", {"from": first, "to": last, "run": run}, place)
