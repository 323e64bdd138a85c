"""What became of a few groups of each step: claimed by an actor, sampled, verified, trained.

Actors say of groups that were drawn by seed when each stage ended (`ActorAlive.stages`), and the controller puts these
into the next `step` event, a few at most:

    "stages": [[order, claimed, sampled, verified, engine, [[version, tokens], …]], …]      times in Unix seconds

That may be before the step which trains the group, or after it; `GroupJoiner` finds the step either way.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, final

import msgspec

from pipelinerl.observability.events import Event

#: Groups whose step has not come yet, orders whose stages have not: the oldest are given up.
_PENDING: Final = 1024
_ORDERS: Final = 1 << 14

_Stages = tuple[int, float, float, float, str, list[tuple[int, int]]]


class TracedGroup(NamedTuple):
    """The stages of one group, in seconds since the run began; `trained` is when its step began to compute.

    `spans` are (version, tokens) of its longest answer, `ended` is when its step was taken.
    """

    order: int
    step: int
    engine: str
    claimed: float
    sampled: float
    verified: float
    trained: float
    ended: float
    spans: tuple[tuple[int, int], ...] = ()


@final
@dataclass(slots=True)
class GroupJoiner:
    """Brings stages and steps together; holds a bounded number of both."""

    _waiting: OrderedDict[int, TracedGroup] = field(default_factory=OrderedDict)
    _trained: OrderedDict[int, tuple[int, float, float]] = field(default_factory=OrderedDict)

    def stepped(self, event: Event, *, step: int, began: float, now: float) -> Iterator[TracedGroup]:
        """Groups whose step and stages are both known with this `step` event, which began to compute at `began`."""
        for order in entries(event, "orders"):
            if isinstance(order, int):
                self._trained[order] = (step, began, now)
        for stages in entries(event, "stages"):
            if (group := _group(stages, number(event.get("time")) - now)) is not None:
                self._waiting[group.order] = group
        for order in [order for order in self._waiting if order in self._trained]:
            step, trained, ended = self._trained[order]
            group = self._waiting.pop(order)
            # The actor's clock may be another machine's: a stage does not end after what follows from it.
            verified = min(group.verified, trained)
            sampled = min(group.sampled, verified)
            claimed = min(group.claimed, sampled)
            yield group._replace(
                step=step, claimed=claimed, sampled=sampled, verified=verified, trained=trained, ended=ended
            )
        _forget(self._waiting, _PENDING)
        _forget(self._trained, _ORDERS)


def _group(stages: Any, began_at: float) -> TracedGroup | None:
    """As an actor said it; None where that is not of this form."""
    try:
        order, claimed, sampled, verified, engine, spans = msgspec.convert(stages, _Stages)
    except msgspec.ValidationError:
        return None
    claimed, sampled, verified = (max(0.0, at - began_at) for at in (claimed, sampled, verified))
    return TracedGroup(order, 0, engine, claimed, sampled, verified, 0.0, 0.0, tuple(spans))


def number(value: Any) -> float:
    """A finite number; 0 for whatever else stands in an event."""
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else 0.0


def entries(event: Event, field: str) -> Sequence[Any]:
    """The entries of a list; none where the field is no list."""
    value = event.get(field)
    return value if isinstance(value, list | tuple) else ()


def _forget(held: OrderedDict[int, Any], most: int) -> None:
    """The oldest, where there are too many."""
    while len(held) > most:
        held.popitem(last=False)
