"""The controller's HTTP routes: what people, engines and launchers ask of a live run.

GET    /health            liveness, without a token
GET    /status            RunStatus
GET    /knobs             values and the log of changes
PATCH  /knobs             {"k": 4, …} → the new values; 422 with one sentence when they cannot run
GET    /engines           base URLs that may be given work
POST   /engines           {"url": …}: an engine joins
DELETE /engines?url=…     an engine leaves for good
POST   /stop              end the run at the next step boundary
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Body, FastAPI, Header, Query
from fastapi.responses import JSONResponse, Response

from pipelinerl.controller.service import ControllerService
from pipelinerl.errors import RecipeError
from pipelinerl.http_service import guard


def create_api(service: ControllerService, *, token: str | None) -> FastAPI:
    """The application; it runs the service while it is up."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        running = asyncio.create_task(service.run())
        running.add_done_callback(lambda task: _note_failure(service, task))
        yield
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running

    app = FastAPI(title="pipelinerl controller", lifespan=lifespan, openapi_url=None)
    app.get("/health")(lambda: {"state": "ready"})
    _add_status(app, service)
    _add_knobs(app, service)
    _add_engines(app, service)
    guard(app, token=token)
    return app


def _note_failure(service: ControllerService, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        causes = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
        service.failure = "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes)


def _add_status(app: FastAPI, service: ControllerService) -> None:
    @app.get("/status")
    async def status() -> Response:
        return Response(service.status().to_json(), media_type="application/json")

    @app.post("/stop")
    async def stop(who: Annotated[str, Header(alias="x-who")] = "somebody") -> dict[str, str]:
        await service.perform(lambda: service.controller.stop(f"stopped by {who}"))
        return {"state": "stopping"}


def _add_knobs(app: FastAPI, service: ControllerService) -> None:
    @app.get("/knobs")
    async def knobs() -> dict[str, Any]:
        log = [
            {"time": change.time, "step": change.step, "who": change.who, "changes": change.changes}
            for change in service.controller.knob_log
        ]
        return {"knobs": service.controller.knobs.to_json(), "log": log}

    @app.patch("/knobs")
    async def patch(
        changes: Annotated[dict[str, Any], Body()], who: Annotated[str, Header(alias="x-who")] = "somebody"
    ) -> Response:
        try:
            await service.perform(lambda: service.controller.patch(changes, who=who, time=time.time()))
        except RecipeError as error:
            return JSONResponse({"error": {"message": str(error), "type": "invalid_knob"}}, status_code=422)
        return JSONResponse({"knobs": service.controller.knobs.to_json(), "effective": "at the next step boundary"})


def _add_engines(app: FastAPI, service: ControllerService) -> None:
    @app.get("/engines")
    async def engines() -> dict[str, list[str]]:
        return {"serving": service.controller.fleet.serving(), "members": service.controller.fleet.members()}

    @app.post("/engines")
    async def join(url: Annotated[str, Body(embed=True)]) -> dict[str, str]:
        await service.perform(lambda: service.controller.engine_joined(url.rstrip("/"), now=time.monotonic()))
        return {"state": "joining"}

    @app.delete("/engines")
    async def leave(url: Annotated[str, Query()]) -> Response:
        if not service.controller.fleet.leave(url.rstrip("/")):
            known = ", ".join(record.url for record in service.controller.fleet.records()) or "none"
            message = f"no engine {url!r} is part of this run; engines are: {known}"
            return JSONResponse({"error": {"message": message, "type": "unknown_engine"}}, status_code=404)
        await service.perform(lambda: service.controller.engine_left(url, "removed by an operator"))
        return JSONResponse({"state": "removed"})
