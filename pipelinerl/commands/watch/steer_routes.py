"""Routes that change a run: `/api/knobs`, `/api/engines`, `/api/stop`.

If no controller answers, they refuse changes and show the state that the event log has.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import Body, FastAPI, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from pipelinerl import registry
from pipelinerl.commands.watch.steering import GRACE_S, described, flat, fleet_values, sort_of
from pipelinerl.commands.watch.watched_run import LooksOnly, Pages, RunNumber, Watched, answer
from pipelinerl.controller.routes import KnobChanges
from pipelinerl.errors import UserError
from pipelinerl.observability.status import RunStatus
from pipelinerl.staleness import PRESETS
from pipelinerl.system.http_service import refusal

_EFFECTIVE: Final = "at the next step boundary"

_Text = Annotated[str, Field(max_length=256)]
_Grace = Annotated[float, Field(ge=0, le=86_400)]


class EngineWanted(BaseModel):
    """Request to add an engine: a running one by its `url`, or `count` new ones of a `type`."""

    url: _Text = ""
    type: _Text = ""
    count: Annotated[int, Field(ge=1, le=64)] = 1


class EngineLeaving(BaseModel):
    """Request to remove the engine with a URL or name; its running requests have `grace_s` seconds to finish."""

    engine: _Text
    grace_s: _Grace = GRACE_S


class EngineReplaced(BaseModel):
    """Request to replace the engine with a URL or name by a new one of a `type`."""

    engine: _Text
    type: _Text
    grace_s: _Grace = GRACE_S


class RunEnding(BaseModel):
    """Request to end a run: stop it, or suspend it for a later resume."""

    suspend: bool = False


def add_steering(app: FastAPI, pages: Pages) -> None:
    """Add the routes to `app`."""
    app.add_exception_handler(UserError, _refused)
    _add_knobs(app, pages)
    _add_engines(app, pages)

    @app.post("/api/stop")
    def stop(ending: RunEnding, number: RunNumber = 0) -> Response:
        pages.of(number).steering.stop(suspend=ending.suspend)
        return answer({"state": "stopping"})


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, UserError)
    status, code = sort_of(error)
    return refusal(status, str(error), code=code)


def _add_knobs(app: FastAPI, pages: Pages) -> None:
    @app.get("/api/knobs")
    def knobs(looks_only: LooksOnly, number: RunNumber = 0) -> Response:
        return answer(_knobs(pages.of(number), looks_only))

    @app.patch("/api/knobs")
    def change(changes: Annotated[KnobChanges, Body()], number: RunNumber = 0) -> Response:
        watched = pages.of(number)
        watched.steering.change(changes)
        return answer(_knobs(watched))

    @app.post("/api/knobs/check")
    def check(changes: Annotated[KnobChanges, Body()], number: RunNumber = 0) -> Response:
        refused = pages.of(number).steering.refused(changes)
        if refused:
            return answer({"ok": False, "refused": refused})
        return answer({"ok": True, "changes": changes, "effective": _EFFECTIVE})


def _add_engines(app: FastAPI, pages: Pages) -> None:
    @app.get("/api/engines")
    def engines(looks_only: LooksOnly, number: RunNumber = 0) -> Response:
        watched = pages.of(number)
        steered, status = _steered(watched, looks_only)
        if status is not None:
            state = fleet_values(status.fleet) | {"source": "controller"}
        else:
            with watched.run.lock:
                state = {"engines": [dict(each) for each in watched.run.view.engines.values()], "source": "events"}
            state |= {"requested": [], "to_stop": [], "tokens_per_s": None, "occupancy": None, "update_pause_s": None}
        return answer(state | {"types": sorted(registry.ENGINES), **steered})

    @app.post("/api/engines/add")
    def add(wanted: EngineWanted, number: RunNumber = 0) -> Response:
        if bool(wanted.url) == bool(wanted.type):
            message = "give either the url of a running engine or a type to start"
            return refusal(422, message, code="invalid_request_error", param="url")
        names = pages.of(number).steering.add(wanted.url, wanted.type, wanted.count)
        return answer({"state": "asked", "names": names})

    @app.post("/api/engines/swap")
    def swap(wanted: EngineReplaced, number: RunNumber = 0) -> Response:
        names = pages.of(number).steering.swap(wanted.engine, wanted.type, wanted.grace_s)
        return answer({"state": "asked", "names": names})

    @app.post("/api/engines/drain")
    def drain(leaving: EngineLeaving, number: RunNumber = 0) -> Response:
        pages.of(number).steering.drain(leaving.engine, leaving.grace_s)
        return answer({"state": "draining"})

    @app.post("/api/engines/remove")
    def remove(leaving: EngineLeaving, number: RunNumber = 0) -> Response:
        pages.of(number).steering.remove(leaving.engine)
        return answer({"state": "removed"})


def _steered(watched: Watched, looks_only: bool = False) -> tuple[dict[str, Any], RunStatus | None]:
    """Return whether this client may change the run, as JSON values, and the controller's status; None if none
    answers.
    """
    if watched.run.view.state:
        status, why_not = None, "the run is over"
    else:
        status, why_not = watched.steering.status(), watched.steering.obstacle(looks_only=looks_only)
    return {"may_steer": not why_not, "why_not": why_not}, status


def _knobs(watched: Watched, looks_only: bool = False) -> dict[str, Any]:
    steered, status = _steered(watched, looks_only)
    if status is not None:
        known = watched.steering.knobs()
        values, log, source = known.knobs, list[Any](known.log), "controller"
    else:
        with watched.run.lock:
            values, log, source = dict(watched.run.view.knobs), list(watched.run.view.knob_log), "events"
    knobs = [described(name, value, watched.steering.steps_of(name)) for name, value in flat(values).items()]
    return {"knobs": knobs, "presets": sorted(PRESETS), "log": log, "source": source, **steered}
