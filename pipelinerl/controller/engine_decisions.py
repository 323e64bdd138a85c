"""What the controller decides about engines: inputs and reports in, changes of the fleet and events out.

    EngineOffered, EngineAnswered, EngineRestarted    joins (anew): weights are due
    EngineMissed, EngineSilent                        gets no work; is dead
    Published, Proved                                 has weights; serves, or is dirty, or is out
    EngineDrainAsked, EngineIdle, Ticked, Removed     ends what it has and is out; is out at once
    EnginesHired                                      the launcher starts processes; they offer themselves

Who swaps an engine for another hires one that `replaces` it: the old one is drained when the new one serves, so the run
always has the engine it had. Nothing here sends: that weights are due follows from the fleet (`awaits_weights`).
"""

from __future__ import annotations

from itertools import count, islice
from typing import Final

import msgspec

from pipelinerl.controller.effects import Effect, Record
from pipelinerl.controller.inputs import (
    EngineAnswered,
    EngineDrainAsked,
    EngineIdle,
    EngineInput,
    EngineMissed,
    EngineOffered,
    EngineRemoved,
    EngineRestarted,
    EnginesHired,
    EngineSilent,
)
from pipelinerl.controller.state import Hire, RunState
from pipelinerl.messages import Proved, Published

_REMOVED: Final = "removed by an operator"


def engine_input(state: RunState, given: EngineInput, *, engines_expected: int) -> list[Effect]:
    """Take one input about engines; `engines_expected` is how many the run began with."""
    fleet = state.fleet
    match given:
        case EngineOffered(url=url, incarnation=incarnation, name=name, type=kind):
            return _joined(url) if fleet.join(url, incarnation, name=name, type=kind) else []
        case EngineMissed(url=url):
            return [Record("engine_suspect", {"url": url})] if fleet.missed(url) else []
        case EngineAnswered(url=url):
            return _answered(state, url)
        case EngineRestarted(url=url):
            return _joined(url) if fleet.restarted(url) else []
        case EngineSilent(url=url, reason=reason):
            return _lost(url, reason) if fleet.silent(url, reason) else []
        case EngineIdle(url=url):
            return _gone(state, url, "drained") if fleet.is_draining(url) else []
        case EngineDrainAsked(url=url, patience_s=patience_s):
            return _drain(state, url, now=given.now, patience_s=patience_s)
        case EngineRemoved(engine=engine):
            return _removed(state, engine)
        case EnginesHired():
            return _hire(state, given, engines_expected=engines_expected)


def published(state: RunState, report: Published) -> list[Effect]:
    """Who has weights now, and who failed to take them."""
    for url in report.pauses_s:
        state.fleet.published(url, report.model_version, membership=report.membership)
    return [
        effect
        for url, reason in report.failed.items()
        if state.fleet.publish_failed(url, reason, membership=report.membership)
        for effect in _lost(url, reason)
    ]


def proved(state: RunState, report: Proved, *, now: float) -> list[Effect]:
    """Who serves from now on, and who does not, with the figures."""
    fleet, version, membership = state.fleet, report.model_version, report.membership
    effects: list[Effect] = []
    for url, worst in report.worst.items():
        if fleet.proved(url, version, membership=membership):
            effects.append(Record("engine_proven", {"url": url, "model_version": version, "worst": worst}))
            effects += _relieve(state, url, now=now)
    for url, reason in report.refuted.items():
        if fleet.unproven(url, version, reason, membership=membership):
            told = {"url": url, "model_version": version, "reason": reason, "standing": fleet.by_url[url].standing}
            effects += [Record("engine_unproven", told), *_lost(url, reason)]
    for url, reason in report.failed.items():
        if fleet.publish_failed(url, reason, membership=membership):
            effects += _lost(url, reason)
    return effects


def overdue(state: RunState, *, now: float) -> list[Effect]:
    """Engines that were to be drained by now: what they still have is handed over."""
    late = [r.url for r in state.fleet.records() if state.fleet.is_draining(r.url) and r.drain_by < now]
    return [effect for url in late for effect in _gone(state, url, "drained; what it still had is handed over")]


def awaited(state: RunState, *, engines_expected: int) -> list[str]:
    """Names of the engines with which the run begins and that are still to join; none waits for who was taken out."""
    hired = {hire.name for hire in state.hires}
    out = [record.name for record in state.fleet.records() if record.dismissed and record.name not in hired]
    members = state.fleet.members()
    come = {*out, *(state.fleet.by_url[url].name for url in members)}
    missing = [name for name in map("engine-{}".format, range(engines_expected)) if name not in come]
    return missing[: max(0, engines_expected - len(out) - len(members))]


def dismissed(state: RunState) -> list[str]:
    """Names of the engines whose processes are to end; ascending."""
    records = {record.name for record in state.fleet.records() if record.dismissed and record.name}
    again = {record.name for record in state.fleet.records() if not record.dismissed}
    return sorted((records - again) | {hire.name for hire in state.hires if not hire.wanted})


def going(state: RunState, url: str) -> str:
    """Why an engine is to go already, in words; empty when it is not."""
    if state.fleet.is_draining(url):
        return "it is being drained"
    names = [hire.name for hire in state.hires if hire.wanted and hire.replaces == url]
    return f"{names[0]}, which can be removed, was hired to replace it" if names else ""


# --- details ---------------------------------------------------------------------------------------------------------


def _joined(url: str) -> list[Effect]:
    return [Record("engine_joined", {"url": url})]


def _lost(url: str, reason: str) -> list[Effect]:
    return [Record("engine_lost", {"url": url, "reason": reason})]


def _answered(state: RunState, url: str) -> list[Effect]:
    proven = url in state.fleet.proven()
    if not state.fleet.answered(url, version=state.version):
        return []
    return [Record("engine_back", {"url": url})] if proven else _joined(url)


def _relieve(state: RunState, url: str, *, now: float) -> list[Effect]:
    """An engine serves: drain the one that it replaces, once: it will prove itself again."""
    name = state.fleet.by_url[url].name
    for hire in state.hires:
        if hire.name == name and hire.replaces and hire.wanted:
            _replaced(state, hire.replaces)
            return _drain(state, hire.replaces, now=now, patience_s=hire.patience_s)
    return []


def _drain(state: RunState, url: str, *, now: float, patience_s: float) -> list[Effect]:
    if not state.fleet.drain(url, now=now, by=now + patience_s):
        return []
    if state.fleet.is_draining(url):
        return [Record("engine_draining", {"url": url, "patience_s": patience_s})]
    return _ended(state, url)


def _removed(state: RunState, engine: str) -> list[Effect]:
    urls = [record.url for record in state.fleet.records() if engine in (record.url, record.name)]
    effects = [effect for url in urls for effect in _gone(state, url, _REMOVED)]
    _unwant(state, engine)
    return effects


def _gone(state: RunState, url: str, reason: str) -> list[Effect]:
    return _ended(state, url) if state.fleet.expel(url, reason, dismissed=True) else []


def _ended(state: RunState, url: str) -> list[Effect]:
    record = state.fleet.by_url[url]
    _unwant(state, record.name)
    _replaced(state, url)
    return _lost(url, record.last_error)


def _replaced(state: RunState, url: str) -> None:
    """No hire is to replace it any more: whoever is at that URL next is another engine."""
    state.hires = [msgspec.structs.replace(h, replaces="") if h.replaces == url else h for h in state.hires]


def _unwant(state: RunState, name: str) -> None:
    state.hires = [msgspec.structs.replace(hire, wanted=hire.wanted and hire.name != name) for hire in state.hires]


def _hire(state: RunState, given: EnginesHired, *, engines_expected: int) -> list[Effect]:
    """A replacement of who is to go already would be one too many; a name that anybody has had is no new one's."""
    if given.replaces and going(state, given.replaces):
        return []
    taken = {record.name for record in state.fleet.records()} | {hire.name for hire in state.hires}
    free = (name for name in map("engine-{}".format, count(engines_expected)) if name not in taken)
    names = list(islice(free, given.count))
    state.hires = [
        *state.hires,
        *(Hire(name=name, type=given.type, replaces=given.replaces, patience_s=given.patience_s) for name in names),
    ]
    return [Record("engines_hired", {"names": names, "type": given.type, "replaces": given.replaces})]
