"""Figures of recent steps: by domain for users, and a window of steps for alarms."""

from __future__ import annotations

from typing import Final

import msgspec

from pipelinerl.messages import GroupStages, VerifierFigures

#: The last `WINDOW` steps are kept, and the entropies of the first `FIRST_STEPS` steps.
WINDOW: Final = 25
FIRST_STEPS: Final = 10


class DomainCounts(msgspec.Struct, frozen=True, array_like=True):
    """Counts of one domain in one step: rollouts, truncated rollouts, groups that arrived, and stale groups."""

    rollouts: float = 0
    truncated: float = 0
    groups: float = 0
    stale: float = 0


class WatchedStep(msgspec.Struct, frozen=True, kw_only=True):
    """A step's figures as used by alarms; None if not measured. `right` is a share of the judged rollouts."""

    step: int
    entropy: float | None = None
    right: float | None = None
    length: float | None = None
    domains: dict[str, DomainCounts] = {}


class WatchedSteps(msgspec.Struct, kw_only=True):
    """The newest figures by domain and tag, and what is remembered for the alarms."""

    by_domain: dict[str, dict[str, float]] = {}
    """Figures of the last step."""
    by_tag: dict[str, dict[str, float]] = {}
    """Figures of the last step."""
    verified: dict[str, VerifierFigures] = {}
    """By domain, cumulative figures of the actors' verifiers as of the last step."""
    outdated: dict[str, int] = {}
    """By domain, the number of groups that actors have given up as stale since the last step."""
    recent: list[WatchedStep] = []
    """The last `WINDOW` steps, oldest first."""
    first_entropies: list[float] = []
    """Entropies of the first `FIRST_STEPS` steps after the run began or was resumed, for the entropy alarm."""
    stages: list[GroupStages] = []
    """Stage timings of a few groups that ended since the last step, for the next step's event."""
    alarms: dict[str, str] = {}
    """Messages of active alarms, by key."""
