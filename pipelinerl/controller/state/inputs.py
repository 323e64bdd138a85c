"""What reaches the controller: values, so that a journal can keep them and a replay can decide on them again.

Each carries `now`, seconds on the controller's monotonic clock: the controller has no clock of its own.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pipelinerl.messages import Report


class Input(msgspec.Struct, frozen=True, kw_only=True, tag_field="input", tag=True):
    """Base of every input; the tag is the class's name."""

    now: float


class ReportReceived(Input, frozen=True):
    """A report, and the id of its entry in the `reports` stream."""

    report: Report
    entry_id: str


class KnobsPatched(Input, frozen=True):
    """Somebody changes knobs; `time` is the wall clock's, for the log of changes."""

    changes: dict[str, Any]
    who: str
    time: float


class EngineRegistered(Input, frozen=True):
    """An engine offers itself, with what it calls itself; without `incarnation`, an operator offers it."""

    url: str
    incarnation: str = ""
    name: str = ""
    type: str = ""


class HealthCheckMissed(Input, frozen=True):
    """A healthy engine did not answer a poll."""

    url: str


class EngineAnswered(Input, frozen=True):
    """An engine that was suspect, dirty or dead answers."""

    url: str


class EngineRestarted(Input, frozen=True):
    """An engine's counters fell: it has begun anew and lost its weights."""

    url: str


class EngineTimedOut(Input, frozen=True):
    """An engine has not answered for too long."""

    url: str
    reason: str


class EngineIdle(Input, frozen=True):
    """An engine that is being drained has had nothing to do for a while."""

    url: str


class EnginesRequested(Input, frozen=True):
    """An operator wants more engines, started by whoever starts this run's processes.

    With `replaces` (a URL), that engine is drained once the new one serves, within `grace_s`; when it is to go
    already, nothing is requested.
    """

    type: str
    count: int = 1
    replaces: str = ""
    grace_s: float = 60.0


class EngineDrainAsked(Input, frozen=True):
    """An operator takes an engine out once it has ended what it has, or after `grace_s`."""

    url: str
    grace_s: float


class EngineRemoved(Input, frozen=True):
    """An operator takes an engine out at once: by URL, or by the name under which it was requested."""

    engine: str


class FleetMeasured(Input, frozen=True):
    """How busy the engines that serve were found by a poll, from 0 to 1; told where their number follows from it."""

    occupancy: float


class StopAsked(Input, frozen=True):
    """The run is to end at its next step boundary."""

    reason: str


class SuspendAsked(Input, frozen=True):
    """The run is to end now with its state saved, and to be gone on with another time."""

    reason: str


class Ticked(Input, frozen=True):
    """Time has passed."""


class StreamsLost(Input, frozen=True):
    """The stream server was killed and has forgotten the end of its history: orders, and groups, may be gone."""


#: What changes the fleet.
EngineInput = (
    EngineRegistered
    | HealthCheckMissed
    | EngineAnswered
    | EngineRestarted
    | EngineTimedOut
    | EngineIdle
    | EnginesRequested
    | EngineDrainAsked
    | EngineRemoved
)
AnyInput = ReportReceived | KnobsPatched | StopAsked | SuspendAsked | Ticked | StreamsLost | FleetMeasured | EngineInput
