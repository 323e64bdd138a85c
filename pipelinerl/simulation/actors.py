"""`SimulatedActors`: orders claimed, requests sent, answers judged, groups delivered.

Each actor does one thing at a time (it is one event loop), and holds `groups_in_flight` orders at most; the rest waits
in the stream. A request goes to the engine with the least to do, as `engines/http/pool.py` has it, by what all actors
have asked for together.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from pipelinerl.simulation.agenda import Agenda
from pipelinerl.simulation.group import SimulatedGroup
from pipelinerl.simulation.hardware import ControlTimes


@final
@dataclass(slots=True)
class SimulatedActors:
    """`sample` takes a group to the engine it names in `place`; `deliver` takes one that is judged to the trainer."""

    agenda: Agenda
    times: ControlTimes
    count: int
    places: int
    """Orders that all actors together may still claim."""
    engines: int
    sample: Callable[[SimulatedGroup], None]
    deliver: Callable[[SimulatedGroup], None]
    _orders: deque[SimulatedGroup] = field(default_factory=deque)
    _free_at: list[float] = field(default_factory=list)
    _verifiers: list[float] = field(default_factory=list)
    _outstanding: list[int] = field(default_factory=list)
    _least: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free_at = [0.0] * self.count
        self._verifiers = [0.0] * (self.times.verifiers or 0)
        self._outstanding = [0] * self.engines
        self._least = [(0, engine) for engine in range(self.engines)]

    def order(self, group: SimulatedGroup) -> None:
        """An order lies in the stream."""
        self._orders.append(group)
        self._claim()

    def again(self, group: SimulatedGroup) -> None:
        """An update has cut answers of a group short: they are asked for again."""
        self._let_go(group)
        self._request(group)

    def answered(self, group: SimulatedGroup) -> None:
        """An engine has ended a group."""
        self._let_go(group)
        self.agenda.at(self._worked(group, self.times.answer_s * group.size), self._judge, group)

    def gave_up(self, group: SimulatedGroup) -> None:
        """A group that was at an engine will not be delivered."""
        self._let_go(group)
        self.ended()

    def ended(self) -> None:
        """One place is free again."""
        self.places += 1
        self._claim()

    def _claim(self) -> None:
        while self._orders and self.places > 0:
            self.places -= 1
            self._request(self._orders.popleft())

    def _request(self, group: SimulatedGroup) -> None:
        self.agenda.at(self._worked(group, self.times.request_s * group.left), self._send, group)

    def _send(self, group: SimulatedGroup) -> None:
        group.place = self._pick()
        self._count(group.place, group.size)
        self.sample(group)

    def _judge(self, group: SimulatedGroup) -> None:
        begins = self.agenda.now
        if self._verifiers:
            begins = max(begins, self._verifiers[0])
            heapq.heapreplace(self._verifiers, begins + self.times.verify_s)
        self.agenda.at(begins + self.times.verify_s, self._done, group)

    def _done(self, group: SimulatedGroup) -> None:
        self.agenda.after(self.times.deliver_s, self.deliver, group)
        self.ended()

    def _worked(self, group: SimulatedGroup, seconds: float) -> float:
        """When its actor has done `seconds` of work, which waits its turn."""
        actor = group.index % self.count
        self._free_at[actor] = max(self.agenda.now, self._free_at[actor]) + seconds
        return self._free_at[actor]

    def _pick(self) -> int:
        """The engine with the fewest answers outstanding; ties go by number."""
        while True:
            outstanding, engine = self._least[0]
            if outstanding == self._outstanding[engine]:
                return engine
            heapq.heappop(self._least)

    def _let_go(self, group: SimulatedGroup) -> None:
        self._count(group.place, -group.size)
        group.place = -1

    def _count(self, engine: int, answers: int) -> None:
        self._outstanding[engine] += answers
        heapq.heappush(self._least, (self._outstanding[engine], engine))
