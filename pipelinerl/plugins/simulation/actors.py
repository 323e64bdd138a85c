"""`SimulatedActors` and `SimulatedTrainer`: the simulation's actors and trainer, and the `Agenda` of its events.

An order is the controller's request for one group. Actors claim orders, send requests, have answers judged, and deliver
groups. An actor does one thing at a time, since it is one event loop. It holds at most `groups_in_flight` orders;
further orders wait in the stream. A request goes to the engine with the fewest outstanding answers, counted over all
actors, as in `engines/http/pool.py`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pipelinerl.plugins.simulation.engine import SimulatedGroup
from pipelinerl.plugins.simulation.hardware import ControlTimes

#: Outstanding answers of a lost engine, so that every other engine has fewer.
_LOST = 2**40


@dataclass(slots=True)
class Agenda:
    """The event queue; `now` is the simulated time in seconds. Simultaneous events happen in order of scheduling."""

    now: float = 0.0
    _events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)
    _serial: int = 0

    def at(self, time: float, what: Callable[..., None], *arguments: Any) -> None:
        """Schedule the call `what(*arguments)` at `time`, or now if `time` has passed."""
        self._serial += 1
        heapq.heappush(self._events, (time if time > self.now else self.now, self._serial, what, arguments))

    def after(self, seconds: float, what: Callable[..., None], *arguments: Any) -> None:
        """Schedule the call `what(*arguments)` in `seconds`."""
        self.at(self.now + seconds, what, *arguments)

    def step(self) -> bool:
        """Process the next event; return False if there is none."""
        if not self._events:
            return False
        self.now, _, what, arguments = heapq.heappop(self._events)
        what(*arguments)
        return True


@dataclass(slots=True)
class SimulatedTrainer:
    """The trainer, which computes at a speed that may change; it calls `done` when a computation ends.

    `done` sets `is_computing` to False.
    """

    agenda: Agenda
    done: Callable[[], None]
    is_computing: bool = False
    _left_s: float = 0.0
    _since: float = 0.0
    _slowness: float = 1.0
    _stamp: int = 0

    def begin(self, seconds: float) -> None:
        """Begin a computation that takes `seconds` if nothing slows it down."""
        self.is_computing, self._left_s = True, seconds
        self._plan()

    def slow(self, factor: float) -> None:
        """From now on, let computations, also the current one, take `factor` times as long as undisturbed ones."""
        if factor == self._slowness:
            return
        if self.is_computing:
            self._left_s -= (self.agenda.now - self._since) / self._slowness
        self._slowness = factor
        if self.is_computing:
            self._plan()

    def _plan(self) -> None:
        self._stamp += 1
        self._since = self.agenda.now
        self.agenda.after(self._left_s * self._slowness, self._ended, self._stamp)

    def _ended(self, stamp: int) -> None:
        if stamp == self._stamp:
            self.done()


@dataclass(slots=True)
class SimulatedActors:
    """The actors of a run. They call `sample` to send a group to its engine, and `deliver` for each judged group."""

    agenda: Agenda
    times: ControlTimes
    count: int
    places: int
    """The number of orders that all actors together may still claim."""
    engines: int
    sample: Callable[[SimulatedGroup], None]
    deliver: Callable[[SimulatedGroup], None]
    _orders: deque[SimulatedGroup] = field(default_factory=deque)
    _free_at: list[float] = field(default_factory=list)
    _verifiers: list[float] = field(default_factory=list)
    _outstanding: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free_at = [0.0] * self.count
        self._verifiers = [0.0] * (self.times.verifiers or 0)
        self._outstanding = [0] * self.engines

    def order(self, group: SimulatedGroup) -> None:
        """Add the order for `group` to the stream from which the actors claim orders."""
        self._orders.append(group)
        self._claim()

    def again(self, group: SimulatedGroup) -> None:
        """Send a new request for those answers of a group that a weight update has aborted."""
        self._let_go(group)
        self._request(group)

    def lose(self, place: int) -> None:
        """Send no more requests to the engine at `place`."""
        self._outstanding[place] += _LOST

    def answered(self, group: SimulatedGroup) -> None:
        """Have the group's answers judged: an engine has finished all of them."""
        self._let_go(group)
        self.agenda.at(self._worked(group, self.times.answer_s * group.size), self._judge, group)

    def gave_up(self, group: SimulatedGroup) -> None:
        """Drop a group that an engine was sampling, since it is too old or has used up its attempts."""
        self._let_go(group)
        self.ended()

    def ended(self) -> None:
        """Let the actors claim one more order, since they have delivered or dropped a group."""
        self.places += 1
        self._claim()

    def _claim(self) -> None:
        while self._orders and self.places > 0:
            self.places -= 1
            self._request(self._orders.popleft())

    def _request(self, group: SimulatedGroup) -> None:
        self.agenda.at(self._worked(group, self.times.request_s * group.left), self._send, group)

    def _send(self, group: SimulatedGroup) -> None:
        group.place = self._outstanding.index(min(self._outstanding))
        self._outstanding[group.place] += group.size
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
        actor = group.index % self.count
        self._free_at[actor] = max(self.agenda.now, self._free_at[actor]) + seconds
        return self._free_at[actor]

    def _let_go(self, group: SimulatedGroup) -> None:
        self._outstanding[group.place] -= group.size
        group.place = -1
