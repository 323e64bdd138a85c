"""What became of a few groups of each step: claimed by an actor, sampled, verified, trained.

Actors say of groups that were drawn by seed when each stage ended (`ActorAlive.stages`), and the controller puts these
into the next `step` event, a few at most:

    "stages": [[order, claimed, sampled, verified, engine, [[version, tokens], …]], …]      times in Unix seconds

That may be before the step which trains the group, or after it; `GroupJoiner` finds the step either way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, final

from pipelinerl.observability.events import Event

#: Groups whose step has not come yet, orders whose stages have not: the oldest are given up.
_PENDING: Final = 1024
_ORDERS: Final = 1 << 14


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

    def stepped(self, event: Event, *, began: float, now: float) -> Iterator[TracedGroup]:
        """Groups whose step and stages are both known with this `step` event, which began to compute at `began`."""
        step = int(event.get("step") or 0)
        for order in event.get("orders") or ():
            self._trained[order] = (step, began, now)
        for stages in event.get("stages") or ():
            if (group := _group(stages, float(event["time"]) - now)) is not None:
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
    if not isinstance(stages, Sequence) or len(stages) != 6:
        return None
    order, claimed, sampled, verified, engine, spans = stages
    claimed, sampled, verified = (max(0.0, float(at) - began_at) for at in (claimed, sampled, verified))
    longest = tuple((int(version), int(tokens)) for version, tokens in spans)
    return TracedGroup(order, 0, str(engine), claimed, sampled, verified, 0.0, 0.0, longest)


def _forget(held: OrderedDict[int, Any], most: int) -> None:
    """The oldest, where there are too many."""
    while len(held) > most:
        held.popitem(last=False)
