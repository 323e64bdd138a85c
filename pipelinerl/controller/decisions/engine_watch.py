"""`EngineWatch`: results of polling the engines: load, token rates, missed polls and restarts.

It holds momentary observations and makes no decisions: the service turns observations into inputs for the controller.
Its contents are not stored, so a restarted controller begins without observations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, final

from inference_contract.schemas import EngineMetrics
from pipelinerl.controller.state.fleet import EngineLifecycle, EngineRecord

#: The most engines in a steady state that are polled per second.
POLLS_PER_S: Final = 128
_STEADY: Final = (EngineLifecycle.JOINING, EngineLifecycle.HEALTHY)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of one engine as of its newest poll; rates cover the time between its two newest polls.

    Attributes:
        occupancy: share of its slots at work, over all time including idle time. Rows that wait for prompt orders,
            for a verifier or for a trainer do not count as work. An engine that reports no busy seconds is assumed
            to be always busy.
        idle_since: when the engine was first seen without work; None while it has work.
    """

    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    tokens_per_s: float = 0.0
    occupancy: float = 0.0
    polled_at: float = 0.0
    missed_polls: int = 0
    idle_since: float | None = None


_UNKNOWN: Final = EngineLoad()


@final
class EngineWatch:
    """Engine loads by base URL. Pure: time and observations are arguments."""

    def __init__(self, *, polls_to_death: int = 5) -> None:
        self._loads: dict[str, EngineLoad] = {}
        self._asked_at: dict[str, float] = {}
        self._polls_to_death = polls_to_death

    def load(self, url: str) -> EngineLoad:
        """Return the engine's load; all zeros if it is unknown."""
        return self._loads.get(url, _UNKNOWN)

    def to_ask(self, records: Sequence[EngineRecord], *, now: float, every_s: float) -> list[str]:
        """Return the engines to poll now, given that this is called every `every_s` seconds.

        In small fleets every engine is polled each time. If more than `POLLS_PER_S` engines per second are steady
        (joining or healthy), only those that were polled least recently are chosen, so the cost of polling stays
        bounded and even. All other engines, such as suspect or draining ones, are polled every time.
        """
        most = math.ceil(POLLS_PER_S * every_s)
        steady = [each.url for each in records if each.lifecycle in _STEADY]
        chosen = [each.url for each in records if each.lifecycle not in _STEADY]
        chosen += sorted(steady, key=lambda url: self._asked_at.get(url, -math.inf))[:most]
        self._asked_at |= dict.fromkeys(chosen, now)
        return chosen

    def answered(self, url: str, metrics: EngineMetrics, now: float) -> bool:
        """Record an engine's answer; return True if its counters went down, which means that the engine has
        restarted.
        """
        known = self.load(url)
        previous, seconds = known.metrics, now - known.polled_at
        restarted = (
            metrics.generated_tokens_total < previous.generated_tokens_total
            or metrics.weight_updates_total < previous.weight_updates_total
        )
        fresh = restarted or known.polled_at == 0.0 or seconds <= 0
        rate = 0.0 if fresh else (metrics.generated_tokens_total - previous.generated_tokens_total) / seconds
        idle = not metrics.running_sequences and not metrics.waiting_sequences
        self._loads[url] = EngineLoad(
            metrics=metrics,
            idle_since=(known.idle_since or now) if idle else None,
            polled_at=now,
            tokens_per_s=rate,
            occupancy=0.0 if fresh else _occupancy(previous, metrics, seconds),
        )
        return restarted

    def on_missed_poll(self, url: str) -> bool:
        """Record a missed poll; return True if the engine has missed too many polls in a row."""
        known = self.load(url)
        self._loads[url] = replace(known, missed_polls=known.missed_polls + 1)
        return known.missed_polls + 1 >= self._polls_to_death

    def forget(self, url: str) -> None:
        """Forget an engine that is no longer polled."""
        self._loads.pop(url, None)
        self._asked_at.pop(url, None)


def _occupancy(before: EngineMetrics, after: EngineMetrics, seconds: float) -> float:
    """Return the share of busy slots (0 to 1) over `seconds`, from the counters at its start and end."""
    steps = after.decode_steps_total - before.decode_steps_total
    if steps <= 0 or not after.slots:
        return 0.0
    rows = (after.occupied_slot_steps_total - before.occupied_slot_steps_total) / (steps * after.slots)
    busy_s = after.busy_s_total - before.busy_s_total
    return rows * min(1.0, busy_s / seconds) if after.busy_s_total else rows
