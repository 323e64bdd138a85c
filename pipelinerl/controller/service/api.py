"""The controller's HTTP routes: what people, engines and launchers ask of a live run. Refusals have OpenAI's shape.

GET    /health            liveness, without a token
GET    /status            RunStatus
GET    /knobs             values and the log of changes
PATCH  /knobs             {"k": 4, …} → the new values; 422 with one sentence when they cannot run
GET    /engines           what actors need: base URLs that may be given work, those that may end what they have, how
                          many groups each actor may hold, and by which version and bounds a rollout is fresh
POST   /engines           {"url": …, "incarnation": …}: an engine joins; the incarnation tells one life from the next;
                          422 for a loopback address of another machine, and where no engine answers an operator's
                          offer, which has no incarnation
POST   /engines/request      {"type": …, "count": …, "replaces": …}: the launcher starts engines → their names; 409 when
                          the one to be replaced is to go already
POST   /engines/drain     {"engine": …, "grace_s": …}: an engine ends what it has, and is taken out
DELETE /engines?engine=…  an engine is taken out; only its next life, or a POST without incarnation, brings it back

An engine is named by its URL or by its name. What is taken out and was started by the launcher is ended by it.

POST   /stop              end the run at the next step boundary
"""

from __future__ import annotations

import math
import time
from ipaddress import IPv6Address, ip_address
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from fastapi import Body, FastAPI, Header, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import AfterValidator

from inference_contract.errors import ContractError
from pipelinerl.controller.decisions.engine_decisions import removal_reason
from pipelinerl.controller.service.service import ControllerService
from pipelinerl.controller.state.effects import Record
from pipelinerl.controller.state.fleet import EngineLifecycle, base_url
from pipelinerl.controller.state.inputs import (
    EngineDrainAsked,
    EngineRegistered,
    EngineRemoved,
    EnginesRequested,
    KnobsPatched,
    StopAsked,
)
from pipelinerl.errors import PipelineError, RecipeError
from pipelinerl.system.http_service import guard, refusal, refuse_in_one_shape


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

_LOCALHOST: Final = "localhost"
_ELSEWHERE: Final = (
    "url: a loopback address leads everybody to their own machine, and this came from {asker}: start the engine with "
    "--host, an address at which the others reach it"
)

_GOING: Final = "{url} is to go already: {why}; to have one engine more, request one that replaces none"

#: Who asks, for the log of changes.
Who = Annotated[str, Header(alias="x-who", max_length=128)]

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
    app.add_exception_handler(RecipeError, _cannot_be)
    refuse_in_one_shape(app)
    guard(app, token=token)
    return app


async def _cannot_be(_: Request, error: Exception) -> Response:
    return refusal(422, str(error), code="invalid_request_error")


def _add_status(app: FastAPI, service: ControllerService) -> None:
    @app.get("/status")
    async def status() -> Response:
        await service.begun()
        return Response(service.status().to_json(), media_type="application/json")

    @app.post("/stop")
    async def stop(who: Who = "somebody") -> dict[str, str]:
        await service.perform(StopAsked(now=await service.now(), reason=f"stopped by {who}"))
        return {"state": "stopping"}


def _add_knobs(app: FastAPI, service: ControllerService) -> None:
    @app.get("/knobs")
    async def knobs() -> dict[str, Any]:
        await service.begun()
        log = [
            {"time": change.time, "step": change.step, "who": change.who, "changes": change.changes}
            for change in service.controller.state.knob_log
        ]
        return {"knobs": service.controller.state.knobs.to_json(), "log": log}

    @app.patch("/knobs")
    async def patch(changes: Annotated[dict[str, Any], Body()], who: Who = "somebody") -> Response:
        try:
            now = await service.now()
            service.controller.state.knobs.patched(changes)  # what cannot run is refused in the words of its knob
            await service.perform(KnobsPatched(now=now, changes=changes, who=who, time=time.time()))
        except RecipeError as error:
            return refusal(422, str(error), code="invalid_knob")
        return JSONResponse(
            {"knobs": service.controller.state.knobs.to_json(), "effective": "at the next step boundary"}
        )


def _add_engines(app: FastAPI, service: ControllerService) -> None:
    @app.get("/engines")
    async def engines() -> dict[str, Any]:
        await service.begun()
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
        request: Request,
        url: BaseUrl,
        incarnation: Annotated[str, Body(max_length=64)] = "",
        name: Annotated[str, Body(max_length=64)] = "",
        type: Annotated[str, Body(max_length=64)] = "",
    ) -> Response:
        asker = request.client.host if request.client is not None else _LOCALHOST
        if _is_local(urlsplit(url).hostname or "") and not _is_local(asker):
            return refusal(422, _ELSEWHERE.format(asker=asker), code="unreachable_engine", param="url")
        if not incarnation:  # an operator's word; what offers itself has asked itself
            try:
                await service.probe(base_url(url))
            except (ContractError, PipelineError) as error:
                return refusal(422, f"url: no engine answers there: {error}", code="unreachable_engine", param="url")
        offer = EngineRegistered(
            now=await service.now(), url=base_url(url), incarnation=incarnation, name=name, type=type
        )
        await service.perform(offer)
        return JSONResponse({"state": "joining"})

    @app.delete("/engines")
    async def leave(engine: Annotated[str, Query()]) -> Response:
        named = _named(service, engine)
        if named is None:
            return _unknown(service)
        await service.perform(EngineRemoved(now=await service.now(), engine=named))
        return JSONResponse({"state": "removed"})

    _add_engine_commands(app, service)


def _add_engine_commands(app: FastAPI, service: ControllerService) -> None:
    @app.post("/engines/drain")
    async def drain(engine: Annotated[str, Body()], grace_s: Patience = PATIENCE_S) -> Response:
        url = _url(service, engine)
        if url is None:
            return _unknown(service)
        await service.perform(EngineDrainAsked(now=await service.now(), url=url, grace_s=grace_s))
        return JSONResponse({"state": "draining"})

    @app.post("/engines/request")
    async def request_engines(
        type: Annotated[str, Body(pattern=r"^[a-z0-9_]{1,32}$")],
        count: Annotated[int, Body(ge=1, le=64)] = 1,
        replaces: Annotated[str, Body()] = "",
        grace_s: Patience = PATIENCE_S,
    ) -> Response:
        replaced = _url(service, replaces) if replaces else ""
        if replaced is None:
            return _unknown(service)
        requested = EnginesRequested(
            now=await service.now(), type=type, count=count, replaces=replaced, grace_s=grace_s
        )
        effects = await service.perform(requested)
        told = [effect.fields for effect in effects if isinstance(effect, Record) and effect.kind == "engines_hired"]
        if not told:
            why = removal_reason(service.controller.state, replaced)
            return refusal(409, _GOING.format(url=replaced, why=why), code="engine_going", param="replaces")
        return JSONResponse({"names": told[0]["names"]})


def _is_local(host: str) -> bool:
    """Does the host stand for whichever machine looks at it?"""
    try:
        address = ip_address(host)
    except ValueError:
        return host == _LOCALHOST
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:  # as a socket for both families has it
        address = address.ipv4_mapped
    return address.is_loopback or address.is_unspecified


def _url(service: ControllerService, engine: str) -> str | None:
    """The URL of an engine that is named by it, or by the name of one that is not out; None when there is none."""
    base = base_url(engine)
    records = service.controller.state.fleet.records()
    named = [r.url for r in records if r.name == engine and r.lifecycle is not EngineLifecycle.EXPELLED]
    return next((r.url for r in records if r.url == base), named[0] if len(named) == 1 else None)


def _named(service: ControllerService, engine: str) -> str | None:
    """The same, or the name of one that was requested and has not come yet."""
    requested = (
        request.name
        for request in service.controller.state.engine_requests
        if request.wanted and request.name == engine
    )
    return _url(service, engine) or next(requested, None)


def _unknown(service: ControllerService) -> Response:
    known = [f"{r.name or 'unnamed'} at {r.url}" for r in service.controller.state.fleet.records()]
    message = f"exactly one engine of this run must have that URL or name; engines are: {', '.join(known) or 'none'}"
    return refusal(404, message, code="unknown_engine", param="engine")
