"""The page's server: files and JSON for a browser that has the link; docs/use/watching.md lists its routes.

It shows what `Follower` has read from the runs' files, and sends changes to the runs' controllers. The processes of a
run do not depend on it. It generates no HTML: the page consists of static files that fetch JSON.
"""

from __future__ import annotations

import mimetypes
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from pipelinerl.commands.watch.access import PageLinks, admit
from pipelinerl.commands.watch.pages import Pages, answer
from pipelinerl.commands.watch.read_routes import add_reading, add_timeline
from pipelinerl.commands.watch.sample_routes import add_samples, add_tokens
from pipelinerl.commands.watch.steer_routes import add_steering
from pipelinerl.commands.watch.stream_route import add_stream
from pipelinerl.commands.watch.watched_run import Follower, WatchedRun
from pipelinerl.observability import page
from pipelinerl.system.http_service import guard, refuse_in_one_shape

#: Directory of the page's files.
STATIC: Final = Path(page.__file__).parent / "static"
_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}


def create_page(
    runs: Sequence[WatchedRun],
    *,
    token: str,
    links: PageLinks,
    cookie: str = "pipelinerl",
    read_only: bool = False,
    share_key: str = "",
) -> FastAPI:
    """Return the application; it reads the runs' files while it is being served.

    Args:
        token: bearer token of programs; browsers receive it as a cookie from a link.
        read_only: refuse all changes.
        share_key: key of the permanent read-only link; empty if there is none.
    """

    @asynccontextmanager
    async def following(_: FastAPI) -> AsyncIterator[None]:
        follower = Follower(runs)
        try:
            yield
        finally:
            follower.close()
            pages.close()

    pages = Pages(runs, read_only=read_only)
    app = FastAPI(title="pipelinerl watch", openapi_url=None, lifespan=following)
    app.get("/health")(lambda: answer({"state": "ready"}))
    _add_files(app)
    add_reading(app, pages)
    add_samples(app, pages)
    add_tokens(app, pages)
    add_steering(app, pages)
    add_stream(app, pages)
    add_timeline(app, pages)
    refuse_in_one_shape(app)
    guard(app, token=token)
    admit(app, links, token=token, cookie=cookie, share_key=share_key)
    return app


def _add_files(app: FastAPI) -> None:
    @app.get("/")
    def page_itself() -> Response:
        return _file("index.html")

    @app.get("/static/{name}")
    def static(name: str) -> Response:
        return _file(name)


def _file(name: str) -> Response:
    """Return a static file of the page by its bare name; other files are never served."""
    known = {path.name: path for path in STATIC.iterdir() if path.is_file()} if STATIC.is_dir() else {}
    if name not in known:
        raise HTTPException(404, "the page has no such file")
    kind = _TYPES.get(known[name].suffix) or mimetypes.guess_type(name)[0] or "text/plain"
    return Response(known[name].read_bytes(), media_type=kind)
