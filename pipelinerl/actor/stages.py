"""Log of when some of an actor's groups were claimed, sampled and verified, for timelines of a run.

An order's seed decides whether its group is logged. A heartbeat carries at most `_MOST` groups, so its size does not
depend on the number of groups.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, final

from pipelinerl.messages import GroupStages
from pipelinerl.types import PromptOrder, Purpose

#: One training group in `_ONE_IN` is logged. A heartbeat has at most `_MOST` groups of at most `_MOST_SPANS` spans.
_ONE_IN: Final = 4
_MOST: Final = 4
_MOST_SPANS: Final = 32


@final
@dataclass(slots=True)
class _UnderWay:
    claimed: float
    sampled: float = 0.0
    engine: str = ""


@final
class StageLog:
    """Recorder of the times at which groups are claimed, sampled and verified. Used on one event loop."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """Create a log. `clock` returns Unix seconds, so that times from different machines can be compared."""
        self._clock = clock
        self._under_way: dict[str, _UnderWay] = {}
        self._ended: list[GroupStages] = []

    @contextmanager
    def claimed(self, order: PromptOrder) -> Iterator[None]:
        """Track an order during the `with` block; at its end, the order is forgotten unless its group was verified."""
        if order.purpose is Purpose.TRAINING and order.seed % _ONE_IN == 0:
            self._under_way[order.order_id] = _UnderWay(self._clock())
        try:
            yield
        finally:
            self._under_way.pop(order.order_id, None)

    def sampled(self, order: PromptOrder, engine: str) -> None:
        """Record that all samples have arrived, the last of them from this engine (base URL)."""
        if (stages := self._under_way.get(order.order_id)) is not None:
            stages.sampled, stages.engine = self._clock(), engine

    def verified(self, order: PromptOrder, spans: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Record that all samples have verdicts; `spans` are the (version, number of tokens) pairs of each sample."""
        stages = self._under_way.get(order.order_id)
        if stages is not None and len(self._ended) < _MOST:
            longest = max(spans, key=lambda each: sum(tokens for _, tokens in each), default=())
            self._ended.append(
                GroupStages(
                    index=order.index,
                    claimed=stages.claimed,
                    sampled=stages.sampled,
                    verified=self._clock(),
                    engine=stages.engine,
                    spans=[(version, tokens) for version, tokens in longest[:_MOST_SPANS]],
                )
            )

    def take(self) -> list[GroupStages]:
        """Return the groups recorded since the last call, and clear the record."""
        ended, self._ended = self._ended, []
        return ended
