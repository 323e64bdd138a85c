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


class Heard(Input, frozen=True):
    """A report, and the id of its entry in the `reports` stream."""

    report: Report
    entry_id: str


class KnobsPatched(Input, frozen=True):
    """Somebody changes knobs; `time` is the wall clock's, for the log of changes."""

    changes: dict[str, Any]
    who: str
    time: float


class EngineOffered(Input, frozen=True):
    """An engine offers itself; without `incarnation`, an operator offers it."""

    url: str
    incarnation: str = ""


class EngineReturned(Input, frozen=True):
    """A dead engine answers again."""

    url: str


class EngineRestarted(Input, frozen=True):
    """An engine's counters fell: it has begun anew and lost its weights."""

    url: str


class EngineSilent(Input, frozen=True):
    """An engine has not answered for too long."""

    url: str
    reason: str


class EngineRemoved(Input, frozen=True):
    """An operator takes an engine out."""

    url: str


class StopAsked(Input, frozen=True):
    """The run is to end at its next step boundary."""

    reason: str


class Ticked(Input, frozen=True):
    """Time has passed."""


AnyInput = (
    Heard
    | KnobsPatched
    | EngineOffered
    | EngineReturned
    | EngineRestarted
    | EngineSilent
    | EngineRemoved
    | StopAsked
    | Ticked
)
