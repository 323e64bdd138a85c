"""`EngineWatch`: what polling the engines shows: load, rates, and who is silent or has begun anew.

It is knowledge of the moment and decides nothing: what follows from it reaches the controller as an input. A controller
that comes back begins without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, final

from inference_contract.schemas import EngineMetrics
from pipelinerl.controller.state.fleet import EngineLifecycle, EngineRecord

#: So many of the engines of which nothing is amiss are polled in a second.
POLLS_PER_S: Final = 128
_STEADY: Final = (EngineLifecycle.JOINING, EngineLifecycle.HEALTHY)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Of one engine, by its last answer; rates are over the time between the last two.

    Attributes:
        occupancy: share of its slots that were at work, of the time too in which none was: rows that wait for orders,
            for a verifier or for a trainer are no work. An engine that counts no busy seconds is taken to have none
            of them to spare.
        idle_since: when it was first found with nothing to do; None while it has something.
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
    """Loads by base URL. Pure: time and observations come in as arguments."""

    def __init__(self, *, polls_to_death: int = 5) -> None:
        self._loads: dict[str, EngineLoad] = {}
        self._asked_at: dict[str, float] = {}
        self._polls_to_death = polls_to_death

    def load(self, url: str) -> EngineLoad:
        """What is known of the engine; zeros when nothing is."""
        return self._loads.get(url, _UNKNOWN)

    def to_ask(self, records: Sequence[EngineRecord], *, now: float, every_s: float) -> list[str]:
        """Which of these engines are to be polled now, where they are looked through every `every_s`.

        All, in a small fleet. Of more than `POLLS_PER_S` engines that serve, or are about to, as many as that, those
        first that were polled longest ago: polls cost the same however many engines there are, and never come all at
        once. Whoever is missed, or is to go, is polled each time.
        """
        most = math.ceil(POLLS_PER_S * every_s)
        steady = [each.url for each in records if each.lifecycle in _STEADY]
        chosen = [each.url for each in records if each.lifecycle not in _STEADY]
        chosen += sorted(steady, key=lambda url: self._asked_at.get(url, -math.inf))[:most]
        self._asked_at |= dict.fromkeys(chosen, now)
        return chosen

    def answered(self, url: str, metrics: EngineMetrics, now: float) -> bool:
        """A poll succeeded; True when its counters fell: it restarted behind our back."""
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
        """A poll failed; True when too many in a row have."""
        known = self.load(url)
        self._loads[url] = replace(known, missed_polls=known.missed_polls + 1)
        return known.missed_polls + 1 >= self._polls_to_death

    def forget(self, url: str) -> None:
        """The engine is asked no more: it has no load."""
        self._loads.pop(url, None)
        self._asked_at.pop(url, None)


def _occupancy(before: EngineMetrics, after: EngineMetrics, seconds: float) -> float:
    """From 0 to 1, over `seconds`, in which counters rose from those before to those after."""
    steps = after.decode_steps_total - before.decode_steps_total
    if steps <= 0 or not after.slots:
        return 0.0
    rows = (after.occupied_slot_steps_total - before.occupied_slot_steps_total) / (steps * after.slots)
    busy_s = after.busy_s_total - before.busy_s_total
    return rows * min(1.0, busy_s / seconds) if after.busy_s_total else rows
