"""How many engines a run wants, by its own figures: the rule that a recipe fixes, and what the controller remembers.

`pipelinerl/controller/decisions/elastic.py` decides. How many there may be at least and at most is in `Knobs`, since it
changes while the run is live.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import msgspec

from pipelinerl.enums import Elasticity


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticRule:
    """When there are too few engines, and when too many.

    Attributes:
        interval_s: over which figures are taken together; a decision needs `patience` such in a row that agree, and
            comes `settle_s` after the one before at the earliest.
        waiting: share of its time for which the trainer waits, above which there are too few engines, if they are busy.
        content: share below which there may be too many.
        busy: share of their slots from which on engines are; what is done must fit on one fewer below it.
        stale: share of groups that come too late to train, above which there are too few, if they are busy, and never
            too many: with fewer, groups would take longer still.
        drain_s: how long what an engine has may run once it is drained.
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
    """Of one interval: shares, as `ElasticRule` has them."""

    waiting: float
    occupancy: float
    stale: float


@final
class ElasticMemory(msgspec.Struct, kw_only=True):
    """What the controller remembers from one measurement to the next."""

    began: float | None = None
    """When the interval under way did; None before the first, and after a change."""
    occupancy: float = 0.0
    """Sum over `polls`."""
    polls: int = 0
    waited_s: float = 0.0
    """Of `steps` since the last interval that had any; `stepped_s` likewise, beside what was waited."""
    stepped_s: float = 0.0
    groups: float = 0.0
    """That came, of which `late` too late to train."""
    late: float = 0.0
    steps: int = 0
    streak: int = 0
    """Intervals in a row that want more engines, or below 0 fewer."""
    changed: float | None = None
    """When the number was changed last, or would have been."""

    def note_poll(self, occupancy: float, *, now: float) -> None:
        """The engines that serve were found to be so busy, from 0 to 1."""
        self.began = now if self.began is None else self.began
        self.occupancy += occupancy
        self.polls += 1

    def taken(self, *, now: float, interval_s: float) -> Figures | None:
        """The figures of the interval that has ended; None before it has, or while no step has."""
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
        """The next interval begins with the next poll."""
        self.began, self.occupancy, self.polls = None, 0.0, 0
        self.waited_s, self.stepped_s, self.groups, self.late, self.steps = 0.0, 0.0, 0.0, 0.0, 0
