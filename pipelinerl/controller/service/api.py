"""The controller's HTTP routes, for users, engines, actors and launchers; `routes.py` lists them.

No request is answered before the controller's state is restored: a restarted controller first reads its journal.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from ipaddress import IPv6Address, ip_address
from typing import Annotated, Final
from urllib.parse import urlsplit

import msgspec
from fastapi import Body, FastAPI, Header, Query, Request
from fastapi.responses import Response

from inference_contract.errors import ContractError
from pipelinerl.controller import routes
from pipelinerl.controller.decisions.directives import turn_cores
from pipelinerl.controller.decisions.engine_decisions import removal_reason
from pipelinerl.controller.routes import VerifierLease
from pipelinerl.controller.service.service import MOST_SERVICES, ControllerService
from pipelinerl.controller.state.fleet import EngineLifecycle, base_url
from pipelinerl.controller.state.inputs_and_effects import (
    EngineDrainAsked,
    EngineRegistered,
    EngineRemoved,
    EnginesRequested,
    KnobsPatched,
    Record,
    StopAsked,
    SuspendAsked,
)
from pipelinerl.errors import PipelineError, RecipeError
from pipelinerl.observability.status import PROMETHEUS_TYPE, Labels, RunStatus, Samples, StatusPhase, labelled_text
from pipelinerl.system.http_service import guard, refusal, refuse_in_one_shape

_LOCALHOST: Final = "localhost"
#: Time limit in seconds for checking that an offered engine answers; the engine waits five seconds for the response.
_PROBE_S: Final = 3.0

_Who = Annotated[str, Header(alias=routes.WHO, max_length=128)]


def create_api(service: ControllerService, *, token: str | None) -> FastAPI:
    """Return the FastAPI application; the caller must also run the service."""
    app = FastAPI(title="pipelinerl controller", openapi_url=None)
    app.get("/health")(lambda: {"state": "ready"})
    _add_status(app, service)
    _add_knobs(app, service)
    _add_engines(app, service)
    _add_verifiers(app, service)
    app.add_exception_handler(RecipeError, lambda _, error: refusal(422, str(error), code="invalid_request_error"))
    refuse_in_one_shape(app)
    guard(app, token=token)
    return app


def _add_status(app: FastAPI, service: ControllerService) -> None:
    @app.get(routes.STATUS)
    async def status(who: _Who = "somebody") -> Response:
        await service.begun.wait()
        if who == routes.LAUNCHER:
            service.note_launcher()
        return _answer(service.status())

    @app.get(routes.METRICS)
    async def metrics() -> Response:
        await service.begun.wait()
        text = run_metrics(service.status(), service.controller.state.trainer.last_step)
        return Response(text, media_type=PROMETHEUS_TYPE)

    @app.get(routes.ASSIGNMENT)
    async def assignment() -> Response:
        await service.begun.wait()
        return _answer(service.assignment())

    @app.post(routes.STOP)
    async def stop(who: _Who = "somebody") -> Response:
        await service.perform(StopAsked(now=await service.now(), reason=f"stopped by {who}"))
        return _answer(routes.Done("stopping"))

    @app.post(routes.SUSPEND)
    async def suspend(who: _Who = "somebody") -> Response:
        await service.perform(SuspendAsked(now=await service.now(), reason=f"suspended by {who}"))
        return _answer(routes.Done("stopping"))


def _add_knobs(app: FastAPI, service: ControllerService) -> None:
    @app.get(routes.KNOBS)
    async def knobs() -> Response:
        await service.begun.wait()
        state = service.controller.state
        return _answer(routes.KnobsAnswer(knobs=state.knobs.to_json(), log=state.knob_log))

    @app.patch(routes.KNOBS)
    async def patch(changes: Annotated[routes.KnobChanges, Body()], who: _Who = "somebody") -> Response:
        try:
            now = await service.now()
            service.controller.state.knobs.patched(changes)  # raises an error that names the knob if a value is invalid
            await service.perform(KnobsPatched(now=now, changes=changes, who=who, time=time.time()))
        except RecipeError as error:
            return refusal(422, str(error), code="invalid_knob")
        state, effective = service.controller.state, "at the next step boundary"
        return _answer(routes.KnobsAnswer(knobs=state.knobs.to_json(), log=state.knob_log, effective=effective))


def _add_engines(app: FastAPI, service: ControllerService) -> None:
    @app.get(routes.ENGINES)
    async def engines() -> Response:
        await service.begun.wait()
        return _answer(service.status().fleet)

    @app.post(routes.ENGINES)
    async def register(request: Request, offer: routes.EngineOffer) -> Response:
        if (refused := _unreachable(request, offer.url, "engine")) is not None:
            return refused
        await service.begun.wait()
        url, fleet, now = base_url(offer.url), service.controller.state.fleet, await service.now()
        count = len(fleet.by_url)
        again_s = routes.OFFER_S if count <= routes.OFFERS_AT_ONCE else routes.OFFER_S * count / routes.OFFERS_AT_ONCE
        controller = service.controller
        if controller.settings.cores:  # an engine must soon know when turns begin or end
            again_s /= 4
        taken = routes.EngineTaken("joining", again_s, turn_cores(controller.state, controller.settings))
        if offer.incarnation and fleet.is_known(url, offer.incarnation, name=offer.name, type=offer.type, now=now):
            return _answer(taken)  # a repeated offer needs no decision and therefore no journal entry
        if (namesake := fleet.namesake_of(url, offer.name)) is not None:
            message = f"name: the engine at {namesake} is {offer.name!r} already; start this one with another --name"
            return refusal(409, message, code="name_taken", param="name")
        if (wait_s := fleet.offer_wait_s(url, offer.incarnation, now=now)) > 0:
            return _answer(routes.EngineTaken("waiting", wait_s))
        try:  # check first that the engine answers: in the process group, all engines would wait for a silent one
            async with asyncio.timeout(_PROBE_S):
                await service.probe.metrics(url)
        except (TimeoutError, ContractError, PipelineError) as error:
            reason = f"no answer within {_PROBE_S:g} s" if isinstance(error, TimeoutError) else error
            message = f"url: no engine answers there: {reason}"
            return refusal(422, message, code="unreachable_engine", param="url")
        about = {"incarnation": offer.incarnation, "name": offer.name, "type": offer.type}
        await service.perform(EngineRegistered(now=await service.now(), url=url, **about))
        return _answer(taken)

    @app.delete(routes.ENGINES)
    async def remove(engine: Annotated[str, Query()]) -> Response:
        url, requests = _url(service, engine), service.controller.state.engine_requests
        if url is None and not any(request.wanted and request.name == engine for request in requests):
            return _unknown(service)
        await service.perform(EngineRemoved(now=await service.now(), engine=url or engine))
        return _answer(routes.Done("removed"))

    @app.post(routes.ENGINES_DRAIN)
    async def drain(order: routes.EngineDrain) -> Response:
        url = _url(service, order.engine)
        if url is None:
            return _unknown(service)
        await service.perform(EngineDrainAsked(now=await service.now(), url=url, grace_s=order.grace_s))
        return _answer(routes.Done("draining"))

    @app.post(routes.ENGINES_REQUEST)
    async def request_engines(start: routes.EngineStart) -> Response:
        replaced = _url(service, start.replaces) if start.replaces else ""
        if replaced is None:
            return _unknown(service)
        wanted = start.model_dump() | {"replaces": replaced}
        effects = await service.perform(EnginesRequested(now=await service.now(), **wanted))
        hired = [each.fields for each in effects if isinstance(each, Record) and each.kind == "engines_hired"]
        if not hired:
            why = removal_reason(service.controller.state, replaced)
            message = f"{replaced} is leaving already: {why}; to add an engine, request one that replaces none"
            return refusal(409, message, code="engine_going", param="replaces")
        return _answer(routes.EngineNames(tuple(hired[0]["names"])))


def _add_verifiers(app: FastAPI, service: ControllerService) -> None:
    @app.post(routes.VERIFIERS)
    async def offer(request: Request, offer: routes.VerifierOffer) -> Response:
        if (refused := _unreachable(request, offer.url, "verifier")) is not None:
            return refused
        lease = VerifierLease(url=base_url(offer.url), incarnation=offer.incarnation, domains=offer.domains)
        if not service.verifiers.offer(lease):
            message = f"a run has at most {MOST_SERVICES} verifier services at a time; end one of them"
            return refusal(409, message, code="too_many_verifiers")
        return _answer(routes.Done("leased"))

    @app.delete(routes.VERIFIERS)
    async def withdraw(url: Annotated[str, Query(max_length=256)]) -> Response:
        service.verifiers.withdraw(base_url(url))
        return _answer(routes.Done("removed"))


def _unreachable(request: Request, url: str, what: str) -> Response | None:
    asker = request.client.host if request.client is not None else _LOCALHOST
    if not _is_local(urlsplit(url).hostname or "") or _is_local(asker):
        return None
    message = (
        f"url: a loopback address only works on its own machine, but this came from {asker}: start the {what} with "
        "--host and an address at which other machines reach it"
    )
    return refusal(422, message, code=f"unreachable_{what}", param="url")


def _answer(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def _is_local(host: str) -> bool:
    """Return True if other machines cannot use the address: `localhost`, a loopback or an unspecified address."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == _LOCALHOST
    # A dual-stack socket reports IPv4 peers as mapped IPv6 addresses.
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback or address.is_unspecified


def _url(service: ControllerService, engine: str) -> str | None:
    """Return the URL of the engine with this URL or unique name, else None. An expelled engine has no name any more."""
    base = base_url(engine)
    records = service.controller.state.fleet.records()
    named = [r.url for r in records if r.name == engine and r.lifecycle is not EngineLifecycle.EXPELLED]
    return next((r.url for r in records if r.url == base), named[0] if len(named) == 1 else None)


def _unknown(service: ControllerService) -> Response:
    known = [f"{r.name or 'unnamed'} at {r.url}" for r in service.controller.state.fleet.records()]
    message = f"exactly one engine of this run must have that URL or name; engines are: {', '.join(known) or 'none'}"
    return refusal(404, message, code="unknown_engine", param="engine")


PREFIX: Final = "pipelinerl"

#: Metrics of the last step that are exported to Prometheus, as reported by the trainer.
_TRAINER: Final = (
    "reward", "accuracy", "loss", "grad_norm", "learning_rate", "entropy", "ess", "clip_fraction", "length_mean",
    "truncated", "staleness_mean", "staleness_max", "wait_s", "step_s", "publish_wait_s", "waiting_groups",
)  # fmt: skip
_DOMAIN: Final = (
    "reward", "accuracy", "length_mean", "truncated", "stale", "verifier_s", "verifier_errors",
    "turns", "environment_s", "tool_errors",
)  # fmt: skip


def run_metrics(status: RunStatus, last_step: Mapping[str, float]) -> str:
    """Return the run's metrics as Prometheus text; `last_step` maps names to the trainer's metrics of the last step."""
    ledger, fleet = status.ledger, status.fleet
    fates = ("issued", "trained", "filtered", "stale", "failed")
    engines: dict[str, Labels] = {each.url: (("url", each.url), ("name", each.name)) for each in fleet.engines}
    metrics: dict[str, Samples] = {
        "steps_total": {(): status.step},
        "steps_planned": {(): status.total_steps},
        "model_version": {(): status.model_version},
        "trainer_epoch": {(): status.epoch},
        "run_elapsed_s": {(): status.elapsed_s},
        "run_still_s": {(): status.still_s},
        "run_phase": {_of("phase", phase.value): float(phase is status.phase) for phase in StatusPhase},
        "run_alarms": {(): len(status.alarms)},
        "orders_total": {_of("fate", fate): getattr(ledger, fate) for fate in fates},
        "orders_in_flight": {(): ledger.in_flight},
        "held_out_accuracy": {
            _of("set", each.name): each.accuracy
            for each in (status.held_out, *status.other_sets)
            if each.accuracy is not None
        },
        "fleet_tokens_per_s": {(): fleet.tokens_per_s},
        "fleet_occupancy": {(): fleet.occupancy},
        "fleet_update_pause_s": {(): fleet.update_pause_s},
        "fleet_engine_serves": {engines[each.url]: float(each.serves) for each in fleet.engines},
        "fleet_engine_version": {engines[each.url]: each.version for each in fleet.engines if each.version is not None},
        "trainer_silent_s": {(): status.trainer.silent_s} if status.trainer is not None else {},
        "actor_silent_s": {_of("actor", each.name): each.silent_s for each in status.actors},
        "actor_groups_in_flight": {_of("actor", each.name): each.groups_in_flight for each in status.actors},
        "process_deaths_total": {_of("process", each.name): each.deaths for each in status.restarts},
    }
    for name in _TRAINER:
        value = last_step.get(name, math.nan)
        metrics[f"trainer_{name}"] = {(): value} if math.isfinite(value) else {}
    for name in _DOMAIN:
        by_domain = status.last_step.by_domain.items()
        metrics[f"domain_{name}"] = {_of("domain", domain): each[name] for domain, each in by_domain if name in each}
    return labelled_text(metrics, prefix=PREFIX)


def _of(label: str, value: str) -> Labels:
    return ((label, value),)
