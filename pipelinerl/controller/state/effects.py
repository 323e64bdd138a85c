"""What the controller wants done: values that `ControllerService` carries out in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipelinerl.messages import Directive
from pipelinerl.types import PromptOrder


@dataclass(frozen=True, slots=True)
class IssuePrompts:
    """Append these orders to the prompt stream."""

    orders: list[PromptOrder]


@dataclass(frozen=True, slots=True)
class Send:
    """Append this directive to the order stream."""

    directive: Directive


@dataclass(frozen=True, slots=True)
class Record:
    """Write an event."""

    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Finish:
    """The run is over."""

    reason: str


Effect = IssuePrompts | Send | Record | Finish
