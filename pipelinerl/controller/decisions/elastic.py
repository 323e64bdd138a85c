"""Decides how many engines a run wants, and has them started and drained like an operator would. Pure.

    engines busy, and the trainer waits, or     more: one is requested, of the first type that has room
      groups come too late to train
    trainer never waits, groups are in time,    fewer: one of the last type that has one too many is drained, the
      the work fits on one fewer                  newest first
    below `engines_min`, above `engines_max`    at once, whatever the figures: an operator has changed a knob

What keeps it from going to and fro: between `content` and `waiting` nothing follows; an engine goes only if those that
stay would still be less than `busy`, and never the last; `patience` intervals in a row must agree; after a change
figures begin anew, and nothing follows for `settle_s`, nor while an engine comes or goes. An engine that could not be
had is not asked for again: its type has what it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from pipelinerl.controller.decisions.engine_decisions import drain, request_engines
from pipelinerl.controller.state.effects import Effect, Record
from pipelinerl.controller.state.elastic import ElasticMemory, ElasticRule, Figures
from pipelinerl.controller.state.fleet import EngineLifecycle, EngineRecord
from pipelinerl.controller.state.inputs import EnginesRequested, FleetMeasured
from pipelinerl.controller.state.run_state import RunPhase, RunState
from pipelinerl.controller.state.settings import ControllerSettings
from pipelinerl.enums import Elasticity


class Want(Enum):
    """How many engines, beside those that there are."""

    MORE = 1
    SAME = 0
    FEWER = -1


#: What the figures show, in words.
_WHY: Final = {
    Want.MORE: "the engines are {occupancy:.0%} busy, the trainer waits {waiting:.0%} of its time, and {stale:.0%} of "
    "groups come too late",
    Want.FEWER: "the engines are {occupancy:.0%} busy, and the trainer waits {waiting:.0%} of its time",
}


def verdict(rule: ElasticRule, figures: Figures, *, engines: int) -> Want:
    """What one interval speaks for, of so many engines that serve."""
    if figures.occupancy >= rule.busy:
        return Want.MORE if figures.waiting > rule.waiting or figures.stale > rule.stale else Want.SAME
    fits = engines > 1 and figures.occupancy * engines / (engines - 1) < rule.busy
    return Want.FEWER if fits and figures.waiting < rule.content and figures.stale <= rule.stale else Want.SAME


def weighed(rule: ElasticRule, memory: ElasticMemory, figures: Figures, *, engines: int, now: float) -> Want:
    """What follows from this interval and those before it; `memory` notes it."""
    want = verdict(rule, figures, engines=engines)
    same_way = want is not Want.SAME and memory.streak * want.value >= 0
    memory.streak = memory.streak + want.value if same_way else want.value
    settled = memory.changed is None or now - memory.changed >= rule.settle_s
    return want if abs(memory.streak) >= rule.patience and settled else Want.SAME


def changed(memory: ElasticMemory, *, now: float) -> None:
    """The number of engines is another, or would be: what was measured is of the one before."""
    memory.forget()
    memory.streak, memory.changed = 0, now


def measured(state: RunState, settings: ControllerSettings, given: FleetMeasured) -> list[Effect]:
    """Take a measurement, and have an engine come or go if it is time for that."""
    rule, memory = settings.elastic, state.elastic
    if rule is None or state.phase is not RunPhase.TRAINING or state.stop_reason or state.failing.reason:
        return []
    if _in_between(state):
        memory.forget()
        return []
    counts = _counts(state)
    if (beyond := _beyond(state, settings, counts)) is not None:
        may = memory.changed is None or given.now - memory.changed >= rule.settle_s
        return _follow(state, settings, beyond, counts, "of the knobs", given.now) if may else []
    memory.note_poll(given.occupancy, now=given.now)
    figures = memory.taken(now=given.now, interval_s=rule.interval_s)
    if figures is None:
        return []
    want = weighed(rule, memory, figures, engines=len(state.fleet.serving()), now=given.now)
    if want is Want.SAME or (type := _type_for(state, settings, want, counts)) is None:
        return []
    return _follow(state, settings, (want, type), counts, in_words(want, figures), given.now)


def in_words(want: Want, figures: Figures) -> str:
    """What these figures show, where they want more engines or fewer."""
    return _WHY[want].format(waiting=figures.waiting, occupancy=figures.occupancy, stale=figures.stale)


def note_step(memory: ElasticMemory, figures: Mapping[str, Any], by_domain: Mapping[str, Mapping[str, float]]) -> None:
    """A step was taken, with these figures."""
    memory.waited_s += figures.get("wait_s", 0.0)
    memory.stepped_s += figures.get("step_s", 0.0)
    late = sum(each.get("stale_groups", 0.0) for each in by_domain.values())
    memory.late += late
    memory.groups += late + sum(each.get("groups", 0.0) for each in by_domain.values())
    memory.steps += 1


# --- details ---------------------------------------------------------------------------------------------------------


def _in_between(state: RunState) -> bool:
    """Is anything under way that figures would be wrong of: an engine that comes or goes, an evaluation?"""
    records = state.fleet.records()
    serving = {record.name for record in records if record.lifecycle is EngineLifecycle.HEALTHY}
    to_come = any(request.wanted and request.name not in serving for request in state.engine_requests)
    moving = any(record.lifecycle in (EngineLifecycle.JOINING, EngineLifecycle.DRAINING) for record in records)
    return to_come or moving or state.evaluations.current is not None


def _counts(state: RunState) -> dict[str, int]:
    """Engines that are there, by type; those that died are, for somebody starts them again."""
    counts = dict.fromkeys(state.knobs.engines_max, 0)
    for record in state.fleet.records():
        if record.type in counts and record.lifecycle is not EngineLifecycle.EXPELLED:
            counts[record.type] += 1
    return counts


def _beyond(state: RunState, settings: ControllerSettings, counts: Mapping[str, int]) -> tuple[Want, str] | None:
    """A type that has fewer engines than it may, or more."""
    for type, count in counts.items():
        if count < state.knobs.engines_min[type] and type not in _not_to_be_had(state):
            return Want.MORE, type
        if count > state.knobs.engines_max[type] and _newest(state, settings, type) is not None:
            return Want.FEWER, type
    return None


def _type_for(state: RunState, settings: ControllerSettings, want: Want, counts: Mapping[str, int]) -> str | None:
    if want is Want.MORE:
        refused = _not_to_be_had(state)
        room = (type for type, most in state.knobs.engines_max.items() if counts[type] < most and type not in refused)
        return next(room, None)
    least = state.knobs.engines_min
    spare = (
        type for type in reversed(least) if counts[type] > least[type] and _newest(state, settings, type) is not None
    )
    return next(spare, None)


def _not_to_be_had(state: RunState) -> set[str]:
    """Types of which a requested engine never came, or was taken out because no retry mends what it refuses."""
    records = {record.name: record for record in state.fleet.records()}
    gone = {request.type for request in state.engine_requests if not request.wanted and request.name not in records}
    return gone | {record.type for record in records.values() if record.refuses}


def _newest(state: RunState, settings: ControllerSettings, type: str) -> EngineRecord | None:
    """Of the engines whose processes are the launcher's, and that nothing is the matter with."""
    names = [*map("engine-{}".format, range(settings.engines_expected)), *(each.name for each in state.engine_requests)]
    own = [
        record
        for record in state.fleet.records()
        if record.name in names and record.type == type and record.lifecycle is EngineLifecycle.HEALTHY
    ]
    return max((each for each in own if not each.pinned), key=lambda record: names.index(record.name), default=None)


def _follow(
    state: RunState,
    settings: ControllerSettings,
    what: tuple[Want, str],
    counts: Mapping[str, int],
    why: str,
    now: float,
) -> list[Effect]:
    rule, (want, type) = settings.elastic, what
    assert rule is not None
    changed(state.elastic, now=now)
    fields = {"type": type, "from": counts[type], "to": counts[type] + want.value, "why": why}
    if rule.mode is Elasticity.DRY_RUN:
        return [Record("engines_would_scale", fields)]
    effects: list[Effect] = [Record("engines_scaled", fields)]
    if want is Want.MORE:
        asked = EnginesRequested(now=now, type=type)
        return effects + request_engines(state, asked, engines_expected=settings.engines_expected)
    newest = _newest(state, settings, type)
    assert newest is not None
    return effects + drain(state, newest.url, now=now, grace_s=rule.drain_s)
