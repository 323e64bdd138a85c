"""`/api/stream`: what happens in a run, as server-sent events, for as many listeners as there are seats.

A listener that is too slow holds its connection and its place in the feed, nothing else; one that comes back says by
`Last-Event-ID` where it was.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Final

import msgspec
from fastapi import Depends, FastAPI, Header
from fastapi.sse import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from pipelinerl.commands.watch.feed import FeedEntry, summarised
from pipelinerl.commands.watch.pages import Pages, RunNumber

#: So many pages may listen at once.
SEATS: Final = 32
_POLL_S: Final = 0.2
_STATE_S: Final = 2.0
#: What a browser that was cut off waits before it comes back, in milliseconds.
_RETRY_MS: Final = 1000


def add_stream(app: FastAPI, pages: Pages) -> None:
    """Add it."""
    seats = asyncio.BoundedSemaphore(SEATS)

    async def seat(number: RunNumber = 0) -> AsyncIterator[None]:
        pages.of(number)  # what is refused later has begun as a success
        if seats.locked():
            raise HTTPException(503, f"{SEATS} pages are listening already; close one of them")
        async with seats:
            yield

    @app.get("/api/stream", response_class=EventSourceResponse, dependencies=[Depends(seat)])
    async def stream(
        number: RunNumber = 0, last_event_id: Annotated[str, Header(max_length=64)] = ""
    ) -> AsyncIterator[ServerSentEvent]:
        run = pages.of(number).run
        place, asked_at = run.feed.place, 0.0
        yield _event("hello", {"cursor": place, "step": run.view.step, "run": number}, place)
        if last_event_id and run.feed.after(last_event_id) is None:
            yield _event("behind", {"from": 0, "to": run.view.step, "run": number}, place)
        elif last_event_id:
            place = last_event_id
        while True:
            if time.monotonic() - asked_at >= _STATE_S:
                await run_in_threadpool(pages.note_states)
                asked_at = time.monotonic()
            entries = run.feed.after(place)
            if entries is None:
                place = run.feed.place
                yield _event("behind", {"from": 0, "to": run.view.step, "run": number}, place)
                continue
            for event in _told(entries, number):
                yield event
            place = entries[-1].place if entries else place
            await asyncio.sleep(_POLL_S)


def _told(entries: Sequence[FeedEntry], run: int) -> list[ServerSentEvent]:
    """Each thing that happened; of many steps only that they were taken."""
    many = summarised(entries)
    told = [
        ServerSentEvent(raw_data=entry.data, event=entry.name, id=entry.place)
        for entry in entries
        if many is None or entry.step is None
    ]
    if many is not None:
        told.append(_event("behind", {"from": many[0], "to": many[1], "run": run}, entries[-1].place))
    return told


def _event(name: str, told: dict[str, object], place: str) -> ServerSentEvent:
    return ServerSentEvent(raw_data=msgspec.json.encode(told).decode(), event=name, id=place, retry=_RETRY_MS)
