"""What the controller wants done: values that `ControllerService` carries out in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pipelinerl.messages import Directive
from pipelinerl.types import PromptOrder


@dataclass(frozen=True, slots=True)
class IssuePrompts:
    """Append these orders to the prompt stream."""

    orders: list[PromptOrder]


@dataclass(frozen=True, slots=True)
class Send:
    """Append this directive to the stream of directives."""

    directive: Directive


@dataclass(frozen=True, slots=True)
class Record:
    """Write an event."""

    kind: str
    fields: dict[str, Any]


class End(StrEnum):
    """How a run ends."""

    COMPLETED = "completed"
    """By its recipe, or because somebody asked for it."""
    SUSPENDED = "suspended"
    """Saved in the middle, to be gone on with."""
    FAILED = "failed"
    """It cannot go on."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over."""

    reason: str
    end: End = End.COMPLETED


Effect = IssuePrompts | Send | Record | Finish
