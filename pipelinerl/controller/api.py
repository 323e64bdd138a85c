"""The controller's HTTP routes: what people, engines and launchers ask of a live run. Refusals have OpenAI's shape.

GET    /health            liveness, without a token
GET    /status            RunStatus
GET    /knobs             values and the log of changes
PATCH  /knobs             {"k": 4, …} → the new values; 422 with one sentence when they cannot run
GET    /engines           base URLs that may be given work, and how many groups each actor may hold
POST   /engines           {"url": …, "incarnation": …}: an engine joins; the incarnation tells one life from the next
DELETE /engines?url=…     an engine is taken out; only its next life, or a POST without incarnation, brings it back
POST   /stop              end the run at the next step boundary
"""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import Body, FastAPI, Header, Query
from fastapi.responses import JSONResponse, Response

from pipelinerl.controller.inputs import EngineOffered, EngineRemoved, KnobsPatched, StopAsked
from pipelinerl.controller.service import ControllerService
from pipelinerl.errors import RecipeError
from pipelinerl.http_service import guard, refusal, refuse_in_one_shape

#: An engine's base URL, as it is written in the fleet: no path, no query, no secret.
BaseUrl = Annotated[str, Body(pattern=r"^https?://[^/?#@\s]+/?$", max_length=256)]


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
            "members": state.fleet.members(),
            "groups_in_flight": state.knobs.groups_in_flight,
        }

    @app.post("/engines")
    async def join(url: BaseUrl, incarnation: Annotated[str, Body(max_length=64)] = "") -> dict[str, str]:
        await service.perform(EngineOffered(now=service.now(), url=url.rstrip("/"), incarnation=incarnation))
        return {"state": "joining"}

    @app.delete("/engines")
    async def leave(url: Annotated[str, Query()]) -> Response:
        base, fleet = url.rstrip("/"), service.controller.state.fleet
        if base not in (known := [record.url for record in fleet.records()]):
            message = f"no such engine is part of this run; engines are: {', '.join(known) or 'none'}"
            return refusal(404, message, code="unknown_engine", param="url")

        await service.perform(EngineRemoved(now=service.now(), url=base))
        return JSONResponse({"state": "removed"})
