"""Automatic scaling: pure rules that decide how many engines a run needs, and request or drain engines accordingly.

    engines busy, and either the trainer waits  scale up: request one, of the first type below its maximum
      or groups arrive too late
    trainer hardly waits, groups are in time,   scale down: drain the newest engine of the last type above its minimum
      and one engine fewer could do the work
    below `engines_min` or above `engines_max`  change regardless of load and `patience`: an operator has set a knob

Several rules prevent oscillation. While the trainer's waiting share is between the thresholds `content` and `waiting`,
nothing changes. An engine is removed only if the remaining ones stay below `busy`, and the last engine is never
removed. `patience` consecutive intervals must suggest the same change. After a change the measurements restart, and no
further change is made for `settle_s` seconds or while an engine joins or drains. If a requested engine could not be
provided, its type is not requested again.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from pipelinerl.config.sections import ElasticSection
from pipelinerl.controller.decisions.engine_decisions import drain, request_engines
from pipelinerl.controller.state.fleet import EngineLifecycle
from pipelinerl.controller.state.inputs_and_effects import Effect, EnginesRequested, FleetMeasured, Record
from pipelinerl.controller.state.run_state import ControllerSettings, ElasticMemory, Figures, RunPhase, RunState
from pipelinerl.enums import Elasticity


class Want(Enum):
    """Desired change in the number of engines."""

    MORE = 1
    SAME = 0
    FEWER = -1


#: The reason for each change, as shown in events.
_WHY: Final = {
    Want.MORE: "the engines are {occupancy:.0%} busy, the trainer waits {waiting:.0%} of its time, and {stale:.0%} of "
    "groups arrive too late",
    Want.FEWER: "the engines are {occupancy:.0%} busy, and the trainer waits {waiting:.0%} of its time",
}


def suggestion(rule: ElasticSection, figures: Figures, *, engines: int) -> Want:
    """Return the change that the measurements of one interval suggest while `engines` engines serve."""
    if figures.occupancy >= rule.busy:
        return Want.MORE if figures.waiting > rule.waiting or figures.stale > rule.stale else Want.SAME
    fits = engines > 1 and figures.occupancy * engines / (engines - 1) < rule.busy
    return Want.FEWER if fits and figures.waiting < rule.content and figures.stale <= rule.stale else Want.SAME


def next_change(rule: ElasticSection, memory: ElasticMemory, figures: Figures, *, engines: int, now: float) -> Want:
    """Remember this interval's suggestion; return the change that `patience` intervals in a row suggest, or `SAME`."""
    want = suggestion(rule, figures, engines=engines)
    same_way = want is not Want.SAME and memory.streak * want.value >= 0
    memory.streak = memory.streak + want.value if same_way else want.value
    settled = memory.changed is None or now - memory.changed >= rule.settle_s
    return want if abs(memory.streak) >= rule.patience and settled else Want.SAME


def note_change(memory: ElasticMemory, *, now: float) -> None:
    """Restart the measurements after the number of engines was changed, or a dry run has announced a change."""
    memory.forget()
    memory.streak, memory.changed = 0, now


def measured(state: RunState, settings: ControllerSettings, given: FleetMeasured) -> list[Effect]:
    """Process one measurement of the load; request or drain an engine if the rule asks for it now."""
    rule, memory, knobs, now = settings.elastic, state.elastic, state.knobs, given.now
    if rule is None or state.phase is not RunPhase.TRAINING or state.stop_reason or state.failing.reason:
        return []
    records, requests = state.fleet.records(), state.engine_requests
    serving = {record.name for record in records if record.lifecycle is EngineLifecycle.HEALTHY}
    to_come = any(request.wanted and request.name not in serving for request in requests)
    moving = any(record.lifecycle in (EngineLifecycle.JOINING, EngineLifecycle.DRAINING) for record in records)
    if to_come or moving or state.evaluations.current is not None:  # measurements are misleading
        memory.forget()
        return []
    # Dead engines count, since their processes are restarted.
    there = [record.type for record in records if record.lifecycle is not EngineLifecycle.EXPELLED]
    counts = {type: there.count(type) for type in knobs.engines_max}
    # No more engines are requested of types of which a request was withdrawn before its engine joined, or an engine was
    # expelled for a permanent cause.
    names = {record.name for record in records}
    gone = {request.type for request in requests if not request.wanted and request.name not in names}
    gone |= {record.type for record in records if record.refuses}
    # By type, the newest engine that may be drained.
    own = [*map("engine-{}".format, range(settings.engines_expected)), *(request.name for request in requests)]
    healthy = [each for each in records if each.lifecycle is EngineLifecycle.HEALTHY and not each.pinned]
    able = sorted((each for each in healthy if each.name in own), key=lambda each: own.index(each.name))
    newest = {record.type: record for record in able}
    fewest, most = knobs.engines_min, knobs.engines_max
    by_knobs = {type: Want.MORE for type in counts if counts[type] < fewest[type] and type not in gone}
    by_knobs |= {type: Want.FEWER for type in counts if counts[type] > most[type] and type in newest}
    if by_knobs:
        if memory.changed is not None and now - memory.changed < rule.settle_s:
            return []
        type = next(type for type in counts if type in by_knobs)
        want, why = by_knobs[type], "of the knobs"
    else:
        memory.note_poll(given.occupancy, now=now)
        figures = memory.end_interval(now=now, interval_s=rule.interval_s)
        if figures is None:
            return []
        want = next_change(rule, memory, figures, engines=len(state.fleet.serving()), now=now)
        room = [type for type in counts if counts[type] < most[type] and type not in gone]
        spare = [type for type in reversed(fewest) if counts[type] > fewest[type] and type in newest]
        candidates = {Want.MORE: room, Want.SAME: [], Want.FEWER: spare}[want]
        if not candidates:
            return []
        type, why = candidates[0], in_words(want, figures)
    note_change(memory, now=now)
    fields = {"type": type, "from": counts[type], "to": counts[type] + want.value, "why": why}
    if rule.mode is Elasticity.DRY_RUN:
        return [Record("engines_would_scale", fields)]
    scaled = Record("engines_scaled", fields)
    if want is Want.MORE:
        asked = EnginesRequested(now=now, type=type)
        return [scaled, *request_engines(state, asked, engines_expected=settings.engines_expected)]
    return [scaled, *drain(state, newest[type].url, now=now, grace_s=rule.drain_s)]


def in_words(want: Want, figures: Figures) -> str:
    """Describe the measurements that suggest the change `want`, which must not be `Want.SAME`."""
    return _WHY[want].format(waiting=figures.waiting, occupancy=figures.occupancy, stale=figures.stale)


def note_step(memory: ElasticMemory, figures: Mapping[str, Any], by_domain: Mapping[str, Mapping[str, float]]) -> None:
    """Add the measurements of one training step to the current interval."""
    memory.waited_s += figures.get("wait_s", 0.0)
    memory.stepped_s += figures.get("step_s", 0.0)
    late = sum(each.get("stale_groups", 0.0) for each in by_domain.values())
    memory.late += late
    memory.groups += late + sum(each.get("groups", 0.0) for each in by_domain.values())
    memory.steps += 1
