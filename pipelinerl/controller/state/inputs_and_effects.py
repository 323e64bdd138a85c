"""The controller's inputs and effects: plain values, so that a journal can store them and a replay can repeat them.

Each input carries `now`, in seconds on the controller's monotonic clock. The controller reads no clock of its own.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from pipelinerl.messages import Directive, Report
from pipelinerl.types import PromptOrder


class Input(msgspec.Struct, frozen=True, kw_only=True, tag_field="input", tag=True):
    """Base class of all inputs; a journaled input is tagged with its class's name."""

    now: float


class ReportReceived(Input, frozen=True):
    """A report of the trainer or of an actor, with the id of its entry in the `reports` stream.

    With `StepDone`, `queued` is the fewest rollouts at any time since it was last given that no engine had begun; None
    while too few polls of the engines show that. `busy` is the share of the machine's cores that were busy since the
    previous step, if engines and trainer share them.
    """

    report: Report
    entry_id: str
    queued: int | None = None
    busy: float | None = None


class KnobsPatched(Input, frozen=True):
    """The user `who` changes knobs; `time` is wall-clock time, for the knob log."""

    changes: dict[str, Any]
    who: str
    time: float


class EngineRegistered(Input, frozen=True):
    """An engine asks to join the fleet; if `incarnation` (its process) is empty, an operator asks for it."""

    url: str
    incarnation: str = ""
    name: str = ""
    type: str = ""


class PolledEngine(Input, frozen=True):
    """Base class of inputs that follow from polls of the engine at `url`."""

    url: str


class HealthCheckMissed(PolledEngine, frozen=True):
    """A healthy engine did not answer a poll, or is late to answer one."""


class EngineAnswered(PolledEngine, frozen=True):
    """A suspect, dirty or dead engine answers a poll."""


class EngineRestarted(PolledEngine, frozen=True):
    """An engine's counters went down: it has restarted and lost its weights."""


class EngineTimedOut(PolledEngine, frozen=True):
    """An engine has not answered for too long."""

    reason: str


class EngineIdle(PolledEngine, frozen=True):
    """A draining engine has been idle for a while."""


class EnginesRequested(Input, frozen=True):
    """An operator requests more engines, to be started by this run's launcher.

    With `replaces` (a URL), the engine at this URL is drained within `grace_s` seconds once the new engine serves. If
    the old engine is already leaving, nothing is requested.
    """

    type: str
    count: int = 1
    replaces: str = ""
    grace_s: float = 60.0


class EngineDrainAsked(Input, frozen=True):
    """An operator removes an engine once its current work is finished, at the latest after `grace_s` seconds."""

    url: str
    grace_s: float


class EngineRemoved(Input, frozen=True):
    """An operator removes an engine immediately: by URL, or by the name under which it was requested."""

    engine: str


class FleetMeasured(Input, frozen=True):
    """A measurement of the serving engines' share of occupied slots (0 to 1); only in elastic runs."""

    occupancy: float


class StopAsked(Input, frozen=True):
    """A user stops the run at its next step boundary."""

    reason: str


class SuspendAsked(Input, frozen=True):
    """A user suspends the run: it saves its state and ends, to be resumed later."""

    reason: str


class Ticked(Input, frozen=True):
    """A regular tick of the clock, so that the controller can react to the passing of time."""


class StreamsLost(Input, frozen=True):
    """The stream server died and lost its newest data, maybe prompt orders, groups of rollouts and directives."""


#: Inputs that change the fleet.
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


class IssuePrompts(NamedTuple):
    """Effect: append these orders to the prompt stream, from which actors read."""

    orders: list[PromptOrder]


class Send(NamedTuple):
    """Effect: append this directive (instructions to the trainer) to the stream from which the trainer reads them."""

    directive: Directive


class Record(NamedTuple):
    """Effect: write an event to the run's event log."""

    kind: str
    fields: dict[str, Any]


class End(StrEnum):
    """The end of a run: completed, failed or suspended."""

    COMPLETED = "completed"
    """The run reached its recipe's end, or a user stopped it."""
    SUSPENDED = "suspended"
    """The run was saved midway, to be resumed later."""
    FAILED = "failed"


class Finish(NamedTuple):
    """Effect: end the run."""

    reason: str
    end: End = End.COMPLETED


Effect = IssuePrompts | Send | Record | Finish
