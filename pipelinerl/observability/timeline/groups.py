"""Traced groups: when a few groups of each step were claimed by an actor, sampled, verified and trained.

Actors report the end of each stage (`ActorAlive.stages`) for groups chosen by seed. The controller adds a few of them
to the next `step` event:

    "stages": [[order, claimed, sampled, verified, engine, [[version, tokens], …]], …]      times in Unix seconds

Stages may arrive before or after the step that trains the group; `GroupJoiner` matches them in either order.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, final

import msgspec

from pipelinerl.observability.events import Event

#: Limits on groups without a step yet and on orders without stages yet; the oldest are dropped.
_PENDING: Final = 1024
_ORDERS: Final = 1 << 14

_Stages = tuple[int, float, float, float, str, list[tuple[int, int]]]


class TracedGroup(NamedTuple):
    """The stages of one group, in seconds since the run began.

    `trained` is the start of its step's computation, `ended` the time at which the step was taken. `spans` are
    (version, tokens) of its longest answer.
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
    """Join of stages and steps; it holds a bounded number of both."""

    _waiting: OrderedDict[int, TracedGroup] = field(default_factory=OrderedDict)
    _trained: OrderedDict[int, tuple[int, float, float]] = field(default_factory=OrderedDict)

    def stepped(self, event: Event, *, step: int, began: float, now: float) -> Iterator[TracedGroup]:
        """Yield groups whose step and stages are both known after this `step` event, whose computation began at
        `began`.
        """
        for order in entries(event, "orders"):
            if isinstance(order, int):
                self._trained[order] = (step, began, now)
        for stages in entries(event, "stages"):
            if (group := _group(stages, number(event.get("time")) - now)) is not None:
                self._waiting[group.order] = group
        for order in [order for order in self._waiting if order in self._trained]:
            step, trained, ended = self._trained[order]
            group = self._waiting.pop(order)
            # The actor's clock may be another machine's, so each stage is limited to the start of the next.
            verified = min(group.verified, trained)
            sampled = min(group.sampled, verified)
            claimed = min(group.claimed, sampled)
            yield group._replace(
                step=step, claimed=claimed, sampled=sampled, verified=verified, trained=trained, ended=ended
            )
        _forget(self._waiting, _PENDING)
        _forget(self._trained, _ORDERS)


def _group(stages: Any, began_at: float) -> TracedGroup | None:
    """Parse the stages from an actor; None if they are malformed."""
    try:
        order, claimed, sampled, verified, engine, spans = msgspec.convert(stages, _Stages)
    except msgspec.ValidationError:
        return None
    claimed, sampled, verified = (max(0.0, at - began_at) for at in (claimed, sampled, verified))
    return TracedGroup(order, 0, engine, claimed, sampled, verified, 0.0, 0.0, tuple(spans))


def number(value: Any) -> float:
    """Return a finite number as float, and 0 for any other value."""
    return float(value) if isinstance(value, int | float) and abs(value) <= sys.float_info.max else 0.0


def entries(event: Event, field: str) -> Sequence[Any]:
    """Return the items of a list field; empty if the field is no list."""
    value = event.get(field)
    return value if isinstance(value, list | tuple) else ()


def _forget(held: OrderedDict[int, Any], most: int) -> None:
    """Drop the oldest entries beyond `most`."""
    while len(held) > most:
        held.popitem(last=False)
