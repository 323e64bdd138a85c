"""The web server of `pipelinerl watch`: files and JSON for a browser; docs/use/watching.md lists the routes.

It shows what a thread has read from the runs' files, and sends changes to the runs' controllers. No process of a run
depends on it. It generates no HTML: the page consists of static files that fetch JSON.
"""

from __future__ import annotations

import asyncio
import mimetypes
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from fastapi import Body, Depends, FastAPI, Header, Request
from fastapi.responses import Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse
from pydantic import BaseModel, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from pipelinerl import registry
from pipelinerl.controller.routes import GRACE_S, KnobChanges
from pipelinerl.errors import UserError
from pipelinerl.observability.status import RunStatus
from pipelinerl.plugins.watch import page
from pipelinerl.plugins.watch.access import AccessMiddleware, PageLinks
from pipelinerl.plugins.watch.read_routes import add_reading, add_samples
from pipelinerl.plugins.watch.steering import described, flat, sort_of
from pipelinerl.plugins.watch.watched_run import (
    STATE_S,
    LooksOnly,
    Pages,
    RunNumber,
    WatchedRun,
    answer,
    as_json,
    frame,
)
from pipelinerl.staleness import MODES
from pipelinerl.system.http_service import guard, refusal, refuse_in_one_shape

#: Maximum number of open pages that may listen to the event stream at the same time.
SEATS: Final = 32
#: Of these, visitors of the shared link have at most `VISITOR_SEATS`, and one address has `ADDRESS_SEATS` at most.
VISITOR_SEATS: Final = 24
ADDRESS_SEATS: Final = 8
#: A listener that lags by more entries than this receives one request to refetch the steps, instead of every step.
_FAR_BEHIND: Final = 200
#: Seconds without an event after which an SSE comment is sent, because proxies close silent connections.
_SILENCE_S: Final = 15.0
#: Seconds between two reads of the runs' files; pages are notified after each read.
_POLL_S: Final = 0.5
#: Seconds of pause after each piece of a long log, so that other threads can run.
_BREATH_S: Final = 0.001


def add_stream(app: FastAPI, pages: Pages) -> None:
    """Add `/api/stream`: events of a run as server-sent events, for a limited number of listeners.

    A listener sleeps until the feed wakes it. When it reconnects, it sends the id of its last event, `Last-Event-ID`.
    FastAPI's event generators are not used: they build a pydantic model per listener and event, and fail if a client
    disconnects within an event.
    """
    seats = Counter[tuple[bool, str]]()  # by whether the page is a visitor's, and its address

    async def seat(request: Request, number: RunNumber = 0) -> AsyncIterator[None]:
        pages.of(number)  # reject an unknown run now: once a response has begun, it cannot become a 404
        is_visitor = bool(getattr(request.state, "looks_only", False))
        mine = is_visitor, request.client.host if request.client else ""
        if seats.total() >= SEATS:
            raise HTTPException(503, f"{SEATS} pages are listening already; close one of them")
        if is_visitor and seats[mine] >= ADDRESS_SEATS:
            raise HTTPException(503, f"{ADDRESS_SEATS} pages of your address are listening already; close one of them")
        if is_visitor and sum(count for (visits, _), count in seats.items() if visits) >= VISITOR_SEATS:
            raise HTTPException(503, f"{VISITOR_SEATS} visitors are listening already; try again later")
        seats[mine] += 1
        try:
            yield
        finally:
            seats[mine] -= 1
            if not seats[mine]:
                del seats[mine]

    @app.get("/api/stream", dependencies=[Depends(seat)])
    async def stream(number: RunNumber = 0, last_event_id: Annotated[str, Header(max_length=64)] = "") -> Response:
        # The header stops nginx from buffering events.
        return EventSourceResponse(_stream_frames(pages, number, last_event_id), headers={"x-accel-buffering": "no"})


async def _stream_frames(pages: Pages, number: int, last_event_id: str) -> AsyncIterator[bytes]:
    run = pages.of(number)
    with run.feed.listener() as bell:
        place, sent_at = run.feed.place, time.monotonic()
        loaded = {"events", "samples"} <= run.loaded
        hello = {"cursor": place, "step": run.view.step, "run": number, "state": run.state, "loaded": loaded}
        yield frame("hello", as_json(hello), place)
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
                place, sent_at = entries[-1].place, time.monotonic()
                taken = [entry.step for entry in entries if entry.step is not None]
                few = len(entries) <= _FAR_BEHIND or not taken
                for entry in entries:
                    if few or entry.step is None:
                        yield entry.frame
                if not few:  # one event asks the page to refetch the steps
                    yield _behind(min(taken) - 1, max(taken), number, place)
            elif time.monotonic() - sent_at >= _SILENCE_S:
                yield KEEPALIVE_COMMENT
                sent_at = time.monotonic()
            with suppress(TimeoutError):
                async with asyncio.timeout(STATE_S):
                    await bell.wait()


def _behind(first: int, last: int, run: int, place: str) -> bytes:
    return frame("behind", as_json({"from": first, "to": last, "run": run}), place)


#: Directory of the page's files.
STATIC: Final = Path(page.__file__).parent / "static"
_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


def create_page(
    runs: Sequence[WatchedRun],
    *,
    token: str,
    links: PageLinks,
    cookie: str = "pipelinerl",
    share_key: str = "",
) -> FastAPI:
    """Return the web application; while it runs, a thread reads the runs' files.

    Args:
        token: bearer token for programs; browsers that open a link receive the token as a cookie.
        share_key: key of the permanent read-only link; empty if there is none.
    """

    @asynccontextmanager
    async def following(_: FastAPI) -> AsyncIterator[None]:
        closed = threading.Event()

        def follow() -> None:
            while not closed.is_set():
                more = [run.advance() for run in runs]
                closed.wait(_BREATH_S if any(more) else _POLL_S)

        thread = threading.Thread(target=follow, name="follower", daemon=True)
        thread.start()
        try:
            yield
        finally:
            closed.set()
            thread.join()
            for run in runs:
                run.steering.close()

    pages = Pages(runs)
    app = FastAPI(title="pipelinerl watch", openapi_url=None, lifespan=following)
    app.get("/health")(lambda: answer({"state": "ready"}))
    app.get("/")(lambda: _file("index.html"))
    app.get("/static/{name}")(_file)
    add_reading(app, pages)
    add_samples(app, pages)
    add_steering(app, pages)
    add_stream(app, pages)
    refuse_in_one_shape(app)
    guard(app, token=token)
    # Add this middleware last, so that it runs before the gate that `guard` has added.
    app.add_middleware(AccessMiddleware, links=links, token=token, cookie=cookie, share_key=share_key)
    return app


def _file(name: str) -> Response:
    # Look the name up among the files of the folder: a path such as `../x` then serves nothing.
    known = {path.name: path for path in STATIC.iterdir() if path.is_file()} if STATIC.is_dir() else {}
    if name not in known:
        raise HTTPException(404, "the page has no such file")
    kind = _TYPES.get(known[name].suffix) or mimetypes.guess_type(name)[0] or "text/plain"
    return Response(known[name].read_bytes(), media_type=kind)


# --- routes that change a run -----------------------------------------------------------------------------------------
#
# The routes `/api/knobs`, `/api/engines` and `/api/stop` pass changes to the run's controller. If no controller
# answers, they refuse changes and show the state from the event log.

_EFFECTIVE: Final = "at the next step boundary"

_Text = Annotated[str, Field(max_length=256)]


class EngineWanted(BaseModel):
    """Request to add engines: a running one by its `url`, or `count` new ones of a `type`."""

    url: _Text = ""
    type: _Text = ""
    count: Annotated[int, Field(ge=1, le=64)] = 1


class EngineLeaving(BaseModel):
    """Request to remove an engine, given by URL or name; its running requests have `grace_s` seconds to finish."""

    engine: _Text
    grace_s: Annotated[float, Field(ge=0, le=86_400)] = GRACE_S


class EngineReplaced(EngineLeaving):
    """Request to replace an engine by a new one of a `type`."""

    type: _Text


def add_steering(app: FastAPI, pages: Pages) -> None:
    """Add the routes that change a run to `app`."""

    @app.exception_handler(UserError)
    async def refused(_: Request, error: UserError) -> Response:
        status, code = sort_of(error)
        return refusal(status, str(error), code=code)

    @app.post("/api/stop")
    def stop(suspend: Annotated[bool, Body(embed=True)] = False, number: RunNumber = 0) -> Response:
        with pages.of(number).steering.changing() as controller:
            (controller.suspend if suspend else controller.stop)()
        return answer({"state": "stopping"})

    @app.get("/api/knobs")
    def knobs(looks_only: LooksOnly, number: RunNumber = 0) -> Response:
        return answer(_knobs(pages.of(number), looks_only))

    @app.patch("/api/knobs")
    def change(changes: Annotated[KnobChanges, Body()], number: RunNumber = 0) -> Response:
        watched = pages.of(number)
        with watched.steering.changing() as controller:
            controller.change_knobs(changes)
        return answer(_knobs(watched))

    @app.post("/api/knobs/check")
    def check(changes: Annotated[KnobChanges, Body()], number: RunNumber = 0) -> Response:
        if refused := pages.of(number).steering.refused(changes):
            return answer({"ok": False, "refused": refused})
        return answer({"ok": True, "changes": changes, "effective": _EFFECTIVE})

    @app.get("/api/engines")
    def engines(looks_only: LooksOnly, number: RunNumber = 0) -> Response:
        watched = pages.of(number)
        steered, status = _steered(watched, looks_only)
        if status is not None:
            state = msgspec.to_builtins(status.fleet) | {"source": "controller"}
        else:
            with watched.lock:
                state = {"engines": [dict(each) for each in watched.view.engines.values()], "source": "events"}
            state |= {"requested": [], "to_stop": [], "tokens_per_s": None, "occupancy": None, "update_pause_s": None}
        return answer(state | {"types": sorted(registry.ENGINES), **steered})

    @app.post("/api/engines/add")
    def add(wanted: EngineWanted, number: RunNumber = 0) -> Response:
        if bool(wanted.url) == bool(wanted.type):
            message = "give either the url of a running engine or a type to start"
            return refusal(422, message, code="invalid_request_error", param="url")
        with pages.of(number).steering.changing() as controller:
            if wanted.url:
                controller.register_engine(wanted.url)
                names: tuple[str, ...] = (wanted.url.rstrip("/"),)
            else:
                names = controller.request_engines(wanted.type, count=wanted.count)
        return answer({"state": "asked", "names": names})

    @app.post("/api/engines/swap")
    def swap(wanted: EngineReplaced, number: RunNumber = 0) -> Response:
        with pages.of(number).steering.changing() as controller:
            names = controller.request_engines(wanted.type, replaces=wanted.engine, grace_s=wanted.grace_s)
        return answer({"state": "asked", "names": names})

    @app.post("/api/engines/drain")
    def drain(leaving: EngineLeaving, number: RunNumber = 0) -> Response:
        with pages.of(number).steering.changing() as controller:
            controller.drain_engine(leaving.engine, grace_s=leaving.grace_s)
        return answer({"state": "draining"})

    @app.post("/api/engines/remove")
    def remove(leaving: EngineLeaving, number: RunNumber = 0) -> Response:
        with pages.of(number).steering.changing() as controller:
            controller.remove_engine(leaving.engine)
        return answer({"state": "removed"})


def _steered(watched: WatchedRun, looks_only: bool = False) -> tuple[dict[str, Any], RunStatus | None]:
    """Return a table of `may_steer` and `why_not`, and the status of the controller if it answers."""
    if watched.view.state:
        status, why_not = None, "the run is over"
    else:
        status, why_not = watched.steering.status(), watched.steering.obstacle(looks_only=looks_only)
    return {"may_steer": not why_not, "why_not": why_not}, status


def _knobs(watched: WatchedRun, looks_only: bool = False) -> dict[str, Any]:
    steered, status = _steered(watched, looks_only)
    if status is not None:
        known = watched.steering.knobs()
        values, log, source = known.knobs, list[Any](known.log), "controller"
    else:
        with watched.lock:
            values, log, source = dict(watched.view.knobs), list(watched.view.knob_log), "events"
    knobs = [described(name, value, watched.steering.steps_of(name)) for name, value in flat(values).items()]
    return {"knobs": knobs, "modes": sorted(MODES), "log": log, "source": source, **steered}
