"""The controller's HTTP routes: what people, engines and launchers ask of a live run. Refusals have OpenAI's shape.

GET    /health            liveness, without a token
GET    /status            RunStatus
GET    /knobs             values and the log of changes
PATCH  /knobs             {"k": 4, …} → the new values; 422 with one sentence when they cannot run
GET    /engines           what actors need: base URLs that may be given work, those that may end what they have, how
                          many groups each actor may hold, and by which version and bounds a rollout is fresh
POST   /engines           {"url": …, "incarnation": …}: an engine joins; the incarnation tells one life from the next
POST   /engines/hire      {"type": …, "count": …, "replaces": …}: the launcher starts engines → their names
POST   /engines/drain     {"engine": …, "patience_s": …}: an engine ends what it has, and is taken out
DELETE /engines?engine=…  an engine is taken out; only its next life, or a POST without incarnation, brings it back

An engine is named by its URL or by its name. What is taken out and was started by the launcher is ended by it.

POST   /stop              end the run at the next step boundary
"""

from __future__ import annotations

import math
import time
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from fastapi import Body, FastAPI, Header, Query
from fastapi.responses import JSONResponse, Response
from pydantic import AfterValidator

from pipelinerl.controller.fleet import Standing
from pipelinerl.controller.inputs import (
    EngineDrainAsked,
    EngineOffered,
    EngineRemoved,
    EnginesHired,
    KnobsPatched,
    StopAsked,
)
from pipelinerl.controller.service import ControllerService
from pipelinerl.errors import RecipeError
from pipelinerl.http_service import guard, refusal, refuse_in_one_shape


def _can_be_looked_up(url: str) -> str:
    try:
        address = urlsplit(url)
        (address.hostname or "").encode("idna")
        found = bool(address.hostname) and address.port != 0
    except ValueError:
        found = False
    if not found:
        raise ValueError(
            "must name a host whose labels have 1 to 63 characters each, and a port from 1 to 65535 if any, such as "
            "http://gpu-1.lab:8001"
        )
    return url


#: An engine's base URL, as it is written in the fleet: no path, no query, no secret.
BaseUrl = Annotated[str, Body(pattern=r"^https?://[^/?#@\s]+/?$", max_length=256), AfterValidator(_can_be_looked_up)]

#: How long what an engine has may run on when the engine is to go, in seconds, unless its operator says otherwise.
PATIENCE_S: Final = 60.0
Patience = Annotated[float, Body(ge=0, le=86_400)]


def create_api(service: ControllerService, *, token: str | None) -> FastAPI:
    """The application; whoever serves it runs the service."""
    app = FastAPI(title="pipelinerl controller", openapi_url=None)
    app.get("/health")(lambda: {"state": "ready"})
    _add_status(app, service)
    _add_knobs(app, service)
    _add_engines(app, service)
    refuse_in_one_shape(app)
    guard(app, token=token)
    return app


def _add_status(app: FastAPI, service: ControllerService) -> None:
    @app.get("/status")
    async def status() -> Response:
        return Response(service.status().to_json(), media_type="application/json")

    @app.post("/stop")
    async def stop(who: Annotated[str, Header(alias="x-who")] = "somebody") -> dict[str, str]:
        await service.perform(StopAsked(now=service.now(), reason=f"stopped by {who}"))
        return {"state": "stopping"}


def _add_knobs(app: FastAPI, service: ControllerService) -> None:
    @app.get("/knobs")
    async def knobs() -> dict[str, Any]:
        log = [
            {"time": change.time, "step": change.step, "who": change.who, "changes": change.changes}
            for change in service.controller.state.knob_log
        ]
        return {"knobs": service.controller.state.knobs.to_json(), "log": log}

    @app.patch("/knobs")
    async def patch(
        changes: Annotated[dict[str, Any], Body()], who: Annotated[str, Header(alias="x-who")] = "somebody"
    ) -> Response:
        try:
            await service.perform(KnobsPatched(now=service.now(), changes=changes, who=who, time=time.time()))
        except RecipeError as error:
            return refusal(422, str(error), code="invalid_knob")
        return JSONResponse(
            {"knobs": service.controller.state.knobs.to_json(), "effective": "at the next step boundary"}
        )


def _add_engines(app: FastAPI, service: ControllerService) -> None:
    @app.get("/engines")
    async def engines() -> dict[str, Any]:
        state = service.controller.state
        return {
            "serving": state.fleet.serving(),
            "finishing": state.fleet.finishing(),
            "members": state.fleet.members(),
            "groups_in_flight": state.knobs.groups_in_flight,
            "model_version": state.version,
            "k": None if math.isinf(state.knobs.k) else state.knobs.k,
        }

    @app.post("/engines")
    async def join(
        url: BaseUrl,
        incarnation: Annotated[str, Body(max_length=64)] = "",
        name: Annotated[str, Body(max_length=64)] = "",
        type: Annotated[str, Body(max_length=64)] = "",
    ) -> dict[str, str]:
        offer = EngineOffered(now=service.now(), url=url.rstrip("/"), incarnation=incarnation, name=name, type=type)
        await service.perform(offer)
        return {"state": "joining"}

    @app.delete("/engines")
    async def leave(engine: Annotated[str, Query()]) -> Response:
        named = _named(service, engine)
        if named is None:
            return _unknown(service)
        await service.perform(EngineRemoved(now=service.now(), engine=named))
        return JSONResponse({"state": "removed"})

    _add_orders(app, service)


def _add_orders(app: FastAPI, service: ControllerService) -> None:
    @app.post("/engines/drain")
    async def drain(engine: Annotated[str, Body()], patience_s: Patience = PATIENCE_S) -> Response:
        url = _url(service, engine)
        if url is None:
            return _unknown(service)
        await service.perform(EngineDrainAsked(now=service.now(), url=url, patience_s=patience_s))
        return JSONResponse({"state": "draining"})

    @app.post("/engines/hire")
    async def hire(
        type: Annotated[str, Body(pattern=r"^[a-z0-9_]{1,32}$")],
        count: Annotated[int, Body(ge=1, le=64)] = 1,
        replaces: Annotated[str, Body()] = "",
        patience_s: Patience = PATIENCE_S,
    ) -> Response:
        replaced = _url(service, replaces) if replaces else ""
        if replaced is None:
            return _unknown(service)
        known = len(service.controller.state.hires)
        hired = EnginesHired(now=service.now(), type=type, count=count, replaces=replaced, patience_s=patience_s)
        await service.perform(hired)
        return JSONResponse({"names": [hire.name for hire in service.controller.state.hires[known : known + count]]})


def _url(service: ControllerService, engine: str) -> str | None:
    """The URL of an engine that is named by it, or by the name of one that is not out; None when there is none."""
    base = engine.rstrip("/")
    records = service.controller.state.fleet.records()
    named = [r.url for r in records if r.name == engine and r.standing is not Standing.EXPELLED]
    return next((r.url for r in records if r.url == base), named[0] if len(named) == 1 else None)


def _named(service: ControllerService, engine: str) -> str | None:
    """The same, or the name of one that was hired and has not come yet."""
    hired = (hire.name for hire in service.controller.state.hires if hire.wanted and hire.name == engine)
    return _url(service, engine) or next(hired, None)


def _unknown(service: ControllerService) -> Response:
    known = [f"{r.name or 'unnamed'} at {r.url}" for r in service.controller.state.fleet.records()]
    message = f"exactly one engine of this run must have that URL or name; engines are: {', '.join(known) or 'none'}"
    return refusal(404, message, code="unknown_engine", param="engine")
