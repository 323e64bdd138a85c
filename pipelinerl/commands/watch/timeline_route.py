"""The route that tells a run as lanes over time: `/api/timeline`, of a window, in as many pieces as it has pixels."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query
from fastapi.responses import Response

from pipelinerl.commands.watch.pages import Pages, RunNumber, answer

#: Seconds since the run began.
_Moment = Annotated[float | None, Query(ge=0, le=1e12, allow_inf_nan=False)]


def add_timeline(app: FastAPI, pages: Pages) -> None:
    """Add it."""

    @app.get("/api/timeline")
    def timeline(
        number: RunNumber = 0,
        first: Annotated[_Moment, Query(alias="from")] = None,
        last: Annotated[_Moment, Query(alias="to")] = None,
        points: Annotated[int, Query(ge=2, le=8000)] = 1500,
    ) -> Response:
        watched = pages.of(number).run
        with watched.lock:
            window = watched.view.timeline.window(first, last, points=points)
        return answer(window)
