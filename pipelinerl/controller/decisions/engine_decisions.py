"""Decisions about engines: which changes of the fleet, and which events, follow from an input or a report.

    EngineRegistered, EngineAnswered, EngineRestarted   the engine joins or rejoins, and needs weights
    HealthCheckMissed                                   others take over the engine's work
    EngineTimedOut                                      the engine is dead
    Published                                           the engine has the weights, or failed: dirty, or expelled
    CanaryChecked                                       the engine serves, or failed: dirty (may retry), or expelled
    EngineDrainAsked, EngineIdle, Ticked                `drain`, then `_expel`: the engine ends its work and leaves
    EngineRemoved                                       `_remove`: the engine is expelled immediately
    EnginesRequested                                    the launcher starts engines, which register themselves

A dirty engine has weights that cannot be trusted; an expelled engine has left the fleet. Methods of the fleet are named
like the events in the table of `state/fleet.py`. A swap requests an engine that `replaces` another engine; the old
engine is drained once the new one serves, so the run never has fewer engines. This module sends no directives to the
trainer: `directives.py` derives from the fleet which publications are due.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import count, islice

import msgspec

from inference_contract.errors import Persistence
from pipelinerl.controller.state.fleet import EngineLifecycle
from pipelinerl.controller.state.inputs_and_effects import (
    Effect,
    EngineAnswered,
    EngineDrainAsked,
    EngineIdle,
    EngineInput,
    EngineRegistered,
    EngineRemoved,
    EngineRestarted,
    EnginesRequested,
    EngineTimedOut,
    HealthCheckMissed,
    Record,
)
from pipelinerl.controller.state.run_state import EngineRequest, RunState
from pipelinerl.messages import CanaryChecked, Published


def engine_input(state: RunState, given: EngineInput, *, engines_expected: int) -> list[Effect]:
    """Process one input about engines; `engines_expected` is the number of engines with which the run began."""
    fleet = state.fleet
    match given:
        case EngineRegistered(url=url, incarnation=life, name=name, type=kind, now=now):
            waits = fleet.offer_wait_s(url, life, now=now) > 0
            return [] if waits or not fleet.join(url, life, name=name, type=kind, now=now) else _join_of(state, url)
        case HealthCheckMissed(url=url):
            return [Record("engine_suspect", {"url": url})] if fleet.on_missed_poll(url) else []
        case EngineAnswered(url=url):
            if not fleet.answered(url, version=state.version, now=given.now):
                return []
            is_back = fleet.by_url[url].lifecycle is EngineLifecycle.HEALTHY
            return [Record("engine_back", {"url": url})] if is_back else _join_of(state, url)
        case EngineRestarted(url=url):
            return _join_of(state, url) if fleet.restarted(url) else []
        case EngineTimedOut(url=url, reason=reason):
            return _loss_of(url, reason) if fleet.on_timeout(url, reason) else []
        case EngineIdle(url=url):
            return _expel(state, url, "drained") if fleet.is_draining(url) else []
        case EngineDrainAsked(url=url, grace_s=grace_s):
            return drain(state, url, now=given.now, grace_s=grace_s)
        case EngineRemoved(engine=engine):
            urls = [record.url for record in fleet.records() if engine in (record.url, record.name)]
            effects = [effect for url in urls for effect in _expel(state, url, "removed by an operator")]
            _cancel_request(state, engine)
            return effects
        case EnginesRequested():
            return request_engines(state, given, engines_expected=engines_expected)


def request_engines(state: RunState, given: EnginesRequested, *, engines_expected: int) -> list[Effect]:
    """Request engines under new names. Do nothing if the engine to be replaced is already leaving."""
    if given.replaces and removal_reason(state, given.replaces):
        return []
    taken = {record.name for record in state.fleet.records()} | {request.name for request in state.engine_requests}
    free = (name for name in map("engine-{}".format, count(engines_expected)) if name not in taken)
    names = list(islice(free, given.count))
    state.engine_requests = [
        *state.engine_requests,
        *(EngineRequest(name=name, type=given.type, replaces=given.replaces, grace_s=given.grace_s) for name in names),
    ]
    return [Record("engines_hired", {"names": names, "type": given.type, "replaces": given.replaces})]


def drain(state: RunState, url: str, *, now: float, grace_s: float) -> list[Effect]:
    """Give an engine no more work; requests that it is already processing may run for another `grace_s` seconds."""
    if not state.fleet.drain(url, now=now, by=now + grace_s):
        return []
    if state.fleet.is_draining(url):
        return [Record("engine_draining", {"url": url, "grace_s": grace_s})]
    return _after_expulsion(state, url)


def published(state: RunState, report: Published) -> list[Effect]:
    """Record which engines received the published weights, and which engines failed."""
    for url in report.pauses_s:
        state.fleet.on_published(url, report.model_version, membership=report.membership)
    return _publish_failed(state, report, blameless=report.blameless)


def canary_checked(state: RunState, report: CanaryChecked, *, now: float) -> list[Effect]:
    """Record which engines passed the canary check and now serve, and which failed it, with the measurements."""
    fleet, version, membership = state.fleet, report.model_version, report.membership
    effects: list[Effect] = []
    for url, worst in report.worst.items():
        if fleet.on_verified(url, version, membership=membership):
            effects.append(Record("engine_verified", {"url": url, "model_version": version, "worst": worst}))
            name = fleet.by_url[url].name
            for request in state.engine_requests:
                if request.name == name and request.replaces and request.wanted:
                    _cancel_replacement(state, request.replaces)
                    effects += drain(state, request.replaces, now=now, grace_s=request.grace_s)
    for url, reason in report.mismatched.items():
        if fleet.canary_failed(url, version, reason, membership=membership):
            fields = {"url": url, "model_version": version, "reason": reason, "lifecycle": fleet.by_url[url].lifecycle}
            effects += [Record("engine_canary_failed", fields), *_loss_of(url, reason)]
    return effects + _publish_failed(state, report)


def overdue(state: RunState, *, now: float) -> list[Effect]:
    """Expel engines whose drain deadline has passed; other engines take over their unfinished requests."""
    late = [r.url for r in state.fleet.records() if state.fleet.is_draining(r.url) and r.drain_by < now]
    return [effect for url in late for effect in _expel(state, url, "drained; its remaining work is handed over")]


def awaited(state: RunState, *, engines_expected: int) -> list[str]:
    """Return the names of initial engines that have not joined yet, except engines that an operator removed."""
    requested = {request.name for request in state.engine_requests}
    out = [record.name for record in state.fleet.records() if record.to_stop and record.name not in requested]
    members = state.fleet.members()
    come = {*out, *(state.fleet.by_url[url].name for url in members)}
    missing = [name for name in map("engine-{}".format, range(engines_expected)) if name not in come]
    return missing[: max(0, engines_expected - len(out) - len(members))]


def to_stop(state: RunState) -> list[str]:
    """Return the names of the engines whose processes the launcher must end, sorted."""
    records = {record.name for record in state.fleet.records() if record.to_stop and record.name}
    again = {record.name for record in state.fleet.records() if not record.to_stop}
    return sorted((records - again) | {request.name for request in state.engine_requests if not request.wanted})


def removal_reason(state: RunState, url: str) -> str:
    """Return the reason why the engine at `url` is leaving; empty if it is not leaving."""
    if state.fleet.is_draining(url):
        return "it is being drained"
    names = [request.name for request in state.engine_requests if request.wanted and request.replaces == url]
    return f"{names[0]}, which can be removed, was requested to replace it" if names else ""


# --- details ---------------------------------------------------------------------------------------------------------


def _publish_failed(
    state: RunState, report: Published | CanaryChecked, *, blameless: Collection[str] = ()
) -> list[Effect]:
    """Record engines that failed an update, `blameless` if by others, or did not answer the canary check."""
    fleet, effects = state.fleet, list[Effect]()
    for url, reason in report.failed.items():
        persistence = Persistence.PERMANENT if url in report.permanent else Persistence.TRANSIENT
        if url in blameless:
            lost = fleet.update_missed(url, reason, membership=report.membership)
        else:
            lost = fleet.publish_failed(url, reason, membership=report.membership, persistence=persistence)
        effects += _loss_of(url, reason) if lost else []
    return effects


def _join_of(state: RunState, url: str) -> list[Effect]:
    name = state.fleet.by_url[url].name
    return [Record("engine_joined", {"url": url} | ({"name": name} if name else {}))]


def _loss_of(url: str, reason: str) -> list[Effect]:
    return [Record("engine_lost", {"url": url, "reason": reason})]


def _expel(state: RunState, url: str, reason: str) -> list[Effect]:
    return _after_expulsion(state, url) if state.fleet.expel(url, reason, to_stop=True) else []


def _after_expulsion(state: RunState, url: str) -> list[Effect]:
    record = state.fleet.by_url[url]
    _cancel_request(state, record.name)
    _cancel_replacement(state, url)
    return [Record("engine_lost", {"url": url, "reason": record.last_error, "planned": True})]


def _cancel_replacement(state: RunState, url: str) -> None:
    """Cancel all requests to replace the engine at `url`, since the next engine at this URL is a different engine."""
    state.engine_requests = [
        msgspec.structs.replace(request, replaces="") if request.replaces == url else request
        for request in state.engine_requests
    ]


def _cancel_request(state: RunState, name: str) -> None:
    state.engine_requests = [
        msgspec.structs.replace(request, wanted=request.wanted and request.name != name)
        for request in state.engine_requests
    ]
