"""What the last steps showed: figures by domain for people, and a window of them for alarms."""

from __future__ import annotations

from typing import Final

import msgspec

from pipelinerl.messages import GroupStages, VerifierFigures

#: So many steps are remembered, and of the run's first steps so many entropies.
WINDOW: Final = 25
FIRST_STEPS: Final = 10


class DomainCounts(msgspec.Struct, frozen=True, array_like=True):
    """Of one domain in one step: rollouts, those of them cut off, groups that came, and those that were too old."""

    rollouts: float = 0
    truncated: float = 0
    groups: float = 0
    stale: float = 0


class WatchedStep(msgspec.Struct, frozen=True, kw_only=True):
    """What alarms read of a step; None where it was not measured. `right` is a share of the judged rollouts."""

    step: int
    entropy: float | None = None
    right: float | None = None
    length: float | None = None
    domains: dict[str, DomainCounts] = {}


class WatchedSteps(msgspec.Struct, kw_only=True):
    """The run's newest figures by domain and tag, and what alarms remember."""

    by_domain: dict[str, dict[str, float]] = {}
    """Of the last step."""
    by_tag: dict[str, dict[str, float]] = {}
    """Of the last step."""
    verified: dict[str, VerifierFigures] = {}
    """By domain, all that the actors' verifiers had done as of the last step."""
    outdated: dict[str, int] = {}
    """By domain, groups that actors have given up since the last step."""
    recent: list[WatchedStep] = []
    """The last `WINDOW` steps, the oldest first."""
    first_entropies: list[float] = []
    """Of the first `FIRST_STEPS` steps since this controller's state began."""
    stages: list[GroupStages] = []
    """Of groups that ended since the last step, a few: the next step's event tells them."""
    alarms: dict[str, str] = {}
    """Those raised and not cleared, by key: what is said of them."""
