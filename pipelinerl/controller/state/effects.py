"""The controller's outputs: values that `ControllerService` carries out in order."""

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
    """Append this directive to the directive stream."""

    directive: Directive


@dataclass(frozen=True, slots=True)
class Record:
    """Write an event."""

    kind: str
    fields: dict[str, Any]


class End(StrEnum):
    """The end of a run: completed, failed or suspended."""

    COMPLETED = "completed"
    """The run reached its recipe's end, or a user stopped it."""
    SUSPENDED = "suspended"
    """The run was saved midway, to be resumed later."""
    FAILED = "failed"
    """The run cannot continue."""


@dataclass(frozen=True, slots=True)
class Finish:
    """End the run."""

    reason: str
    end: End = End.COMPLETED


Effect = IssuePrompts | Send | Record | Finish
