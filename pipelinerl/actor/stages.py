"""`StageLog`: when a few of an actor's groups were claimed, sampled and verified, for those who draw a run over time.

Which groups is a function of the run's seed. A heartbeat carries the first `_MOST` that have ended since the one
before, so that this costs the same however many groups there are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, final

from pipelinerl.messages import GroupStages
from pipelinerl.types import PromptOrder, Purpose

#: One group in so many is drawn; a heartbeat carries at most so many, and of an answer at most so many spans.
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
    """Notes stages as they end; one event loop uses it."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """`clock` tells Unix seconds, which other machines' clocks are compared with."""
        self._clock = clock
        self._under_way: dict[str, _UnderWay] = {}
        self._ended: list[GroupStages] = []

    @contextmanager
    def claimed(self, order: PromptOrder) -> Iterator[None]:
        """While this order is worked on; however that ends, nothing of it stays."""
        if order.purpose is Purpose.TRAINING and order.seed % _ONE_IN == 0:
            self._under_way[order.order_id] = _UnderWay(self._clock())
        try:
            yield
        finally:
            self._under_way.pop(order.order_id, None)

    def sampled(self, order: PromptOrder, engine: str) -> None:
        """All its samples are there, the last of them from this engine (base URL)."""
        if (stages := self._under_way.get(order.order_id)) is not None:
            stages.sampled, stages.engine = self._clock(), engine

    def verified(self, order: PromptOrder, spans: Sequence[Sequence[tuple[int, int]]]) -> None:
        """All its samples have their verdicts; `spans` are of (version, tokens), of each sample."""
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
        """What was not taken yet."""
        ended, self._ended = self._ended, []
        return ended
