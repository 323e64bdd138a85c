"""The rule by which a run scales its number of engines, and the measurements the controller keeps for it.

`pipelinerl/controller/decisions/elastic.py` makes the decision. The minimum and maximum number of engines are in
`Knobs`, since they can change while the run is live.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import msgspec

from pipelinerl.enums import Elasticity


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRule:
    """Thresholds for having too few engines, or too many.

    Attributes:
        interval_s: length of one measurement interval. A change needs `patience` consecutive intervals that agree,
            and at least `settle_s` since the previous change.
        waiting: if the trainer waits for more than this share of its time and engines are busy, there are too few
            engines.
        content: if the trainer waits for less than this share of its time, there may be too many engines.
        busy: engines count as busy if at least this share of their slots is occupied. An engine is only removed if
            the current work would occupy less than this share of the slots of the remaining engines.
        stale: if more than this share of groups is too old to train and engines are busy, there are too few
            engines. Above this share, engines are never removed, since groups would then take even longer.
        drain_s: seconds for which a drained engine may continue its current work.
    """

    mode: Elasticity = Elasticity.ON
    interval_s: float = 10.0
    patience: int = 3
    settle_s: float = 60.0
    waiting: float = 0.15
    content: float = 0.05
    busy: float = 0.8
    stale: float = 0.1
    drain_s: float = 60.0


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one interval, as shares; `ElasticRule` has the thresholds."""

    waiting: float
    occupancy: float
    stale: float


@final
class ElasticMemory(msgspec.Struct, kw_only=True):
    """Measurements of the current interval, and the memory of earlier verdicts and changes."""

    began: float | None = None
    """Start of the current interval; None before the first poll and after a change."""
    occupancy: float = 0.0
    """Sum of the shares of occupied slots that were measured by `polls` polls."""
    polls: int = 0
    waited_s: float = 0.0
    """Time the trainer waited in `steps`, and in `stepped_s` the time it worked, since the last complete interval."""
    stepped_s: float = 0.0
    groups: float = 0.0
    """Groups that arrived; `late` of them were too old to train."""
    late: float = 0.0
    steps: int = 0
    streak: int = 0
    """Consecutive intervals that call for more engines; negative if they call for fewer."""
    changed: float | None = None
    """Time of the last change in the number of engines, or of a dry run's last suggestion."""

    def note_poll(self, occupancy: float, *, now: float) -> None:
        """Add a poll's result: the share of occupied slots of the serving engines (0 to 1)."""
        self.began = now if self.began is None else self.began
        self.occupancy += occupancy
        self.polls += 1

    def taken(self, *, now: float, interval_s: float) -> Figures | None:
        """Return the figures of the current interval if it has ended, and begin a new interval.

        None while the interval lasts, or if no step was completed in it.
        """
        if self.began is None or now - self.began < interval_s or not self.steps or not self.polls:
            return None
        seconds = self.waited_s + self.stepped_s
        figures = Figures(
            waiting=self.waited_s / seconds if seconds > 0 else 0.0,
            occupancy=self.occupancy / self.polls,
            stale=self.late / self.groups if self.groups else 0.0,
        )
        self.forget()
        return figures

    def forget(self) -> None:
        """Reset the measurements; the next interval begins with the next poll."""
        self.began, self.occupancy, self.polls = None, 0.0, 0
        self.waited_s, self.stepped_s, self.groups, self.late, self.steps = 0.0, 0.0, 0.0, 0.0, 0
