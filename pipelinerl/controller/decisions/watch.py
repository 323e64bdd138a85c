"""The load and speed of each engine, computed from polls.

Pure: time and the results of polls are arguments. Nothing here is part of the journal or of checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_high
from typing import Final

import numpy as np
from numpy.typing import NDArray

from inference_contract.schemas import EngineMetrics
from pipelinerl.controller.state.fleet import EngineLifecycle, EngineRecord

#: Weight of a poll relative to the next one: an estimate of speed follows a change within about ten polls.
_SPEED_FADES: Final = 0.9
#: Sum of weights from which on an estimate counts.
_FEW: Final = 3.0
#: Polls with fewer decode steps say too little.
_LEAST_STEPS: Final = 5
#: The power of the rows if the fleet's rows have not varied, and the variance of log(rows) that outweighs this guess.
_POWER: Final = 0.5
_VARIANCE: Final = 0.02
#: Engines whose speeds differ by less than this factor count as equal.
ALIKE: Final = 1.25
_MOST: Final = 20.0


class EngineSpeeds:
    """How fast each engine is, by base URL, relative to its fleet, measured from decode steps.

    A poll gives the seconds per decode step and the rows per step since the last poll. A step with more rows takes
    longer, so the seconds alone would make a busy engine look slow, and tokens per second an idle one. Either would
    feed back into the work that the engine gets. So the fleet's steps also show by which power of the rows a step
    grows, from 0 (the weights' memory is read once for any number of rows) to 1 (each row costs the same):

        log(step seconds) = power · log(rows) − log(speed of the engine)

    The seconds are those of the engine's clock, so they include the time in which its process was suspended.
    """

    def __init__(self) -> None:
        # By URL, faded sums over polls: of weights, x = log(rows), y = log(seconds of a step), x², and xy.
        self._sums: dict[str, NDArray[np.float64]] = {}

    def note(self, url: str, *, steps: float, rows: float, busy_s: float) -> None:
        """Record `steps` decode steps with `rows` rows in total, which kept the engine busy for `busy_s` seconds."""
        if steps >= _LEAST_STEPS and rows > 0 and busy_s > 0:
            x, y = math.log(rows / steps), math.log(busy_s / steps)
            self._sums[url] = _SPEED_FADES * self._sums.get(url, np.zeros(5)) + (1.0, x, y, x * x, x * y)

    def forget(self, url: str) -> None:
        """Drop the measurements of an engine."""
        self._sums.pop(url, None)

    def of(self, urls: Iterable[str]) -> dict[str, float]:
        """Return the measured speeds of `urls` that differ from their median (of two, the faster), as factors."""
        known = [url for url in urls if url in self._sums and self._sums[url][0] >= _FEW]
        if len(known) < 2:
            return {}
        sums = np.array([self._sums[url] for url in known]).T
        x, y, xx, xy = sums[1:] / sums[0]
        variance, covariance = np.maximum(0.0, xx - x**2).sum(), (xy - x * y).sum()
        power = min(1.0, max(0.0, (covariance + _POWER * _VARIANCE) / (variance + _VARIANCE)))
        speeds = power * x - y
        factors = np.exp(speeds - median_high(speeds)).clip(1 / _MOST, _MOST)
        return {url: round(float(at), 2) for url, at in zip(known, factors, strict=True) if not 1 / ALIKE < at < ALIKE}


#: Maximum number of steady engines (joining or healthy) that are polled per second.
POLLS_PER_S: Final = 128
#: An engine is late to answer a poll after this many times its usual time, and at least this many seconds.
_LATE_TIMES: Final = 3.0
_LATE_S: Final = 2.0
#: The usual time is the longest recent one, which fades by this factor with each answer.
_FADES: Final = 0.95
_STEADY: Final = (EngineLifecycle.JOINING, EngineLifecycle.HEALTHY)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Load of one engine as of its newest poll; rates cover the time between its two newest polls.

    `occupancy` is the mean share of slots (room for one sequence each) that decode a sequence. It includes time in
    which the engine has no work, for example because prompt orders, a verifier or the trainer are late. An engine that
    does not measure its busy seconds counts as always busy. `idle_since` is when the engine was first seen without
    work; None while it has work.
    """

    metrics: EngineMetrics = field(default_factory=EngineMetrics)
    tokens_per_s: float = 0.0
    occupancy: float = 0.0
    polled_at: float = 0.0
    missed_polls: int = 0
    idle_since: float | None = None


class EngineWatch:
    """The load of each engine by base URL."""

    def __init__(self, *, polls_to_death: int = 5) -> None:
        self._loads: dict[str, EngineLoad] = {}
        self._polled_at: dict[str, float] = {}
        self._answers_s: dict[str, float] = {}
        self.speeds = EngineSpeeds()
        self._polls_to_death = polls_to_death

    def load(self, url: str) -> EngineLoad:
        """Return the load of the engine at `url`; all zeros if the engine is unknown."""
        return self._loads.get(url, EngineLoad())

    def to_poll(self, records: Sequence[EngineRecord], *, now: float, every_s: float) -> list[str]:
        """Return the engines to poll now, given that this is called every `every_s` seconds.

        Of the steady engines (joining or healthy), at most `POLLS_PER_S` a second are polled, least recently polled
        first, so the cost is bounded and even. Engines in other states, such as suspect or draining, are polled every
        time.
        """
        most = math.ceil(POLLS_PER_S * every_s)
        steady = [each.url for each in records if each.lifecycle in _STEADY]
        chosen = [each.url for each in records if each.lifecycle not in _STEADY]
        chosen += sorted(steady, key=lambda url: self._polled_at.get(url, -math.inf))[:most]
        self._polled_at |= dict.fromkeys(chosen, now)
        return chosen

    def answered(self, url: str, metrics: EngineMetrics, now: float, *, took_s: float = 0.0) -> bool:
        """Record the answer to a poll, which took `took_s`; return True if its counters went down, by a restart."""
        self._answers_s[url] = max(took_s, _FADES * self._answers_s.get(url, 0.0))
        known = self.load(url)
        previous, seconds = known.metrics, now - known.polled_at
        restarted = (
            metrics.generated_tokens_total < previous.generated_tokens_total
            or metrics.weight_updates_total < previous.weight_updates_total
        )
        fresh = restarted or known.polled_at == 0.0 or seconds <= 0
        rate = 0.0 if fresh else (metrics.generated_tokens_total - previous.generated_tokens_total) / seconds
        if restarted:
            self.speeds.forget(url)
        elif not fresh:
            self.speeds.note(
                url,
                steps=metrics.decode_steps_total - previous.decode_steps_total,
                rows=metrics.occupied_slot_steps_total - previous.occupied_slot_steps_total,
                busy_s=metrics.busy_s_total - previous.busy_s_total,
            )
        idle = not metrics.running_sequences and not metrics.waiting_sequences
        steps, occupancy = metrics.decode_steps_total - previous.decode_steps_total, 0.0
        if not fresh and steps > 0 and metrics.slots:
            rows = metrics.occupied_slot_steps_total - previous.occupied_slot_steps_total
            busy_s = metrics.busy_s_total - previous.busy_s_total
            occupancy = rows / (steps * metrics.slots) * (min(1.0, busy_s / seconds) if metrics.busy_s_total else 1.0)
        self._loads[url] = EngineLoad(
            metrics=metrics,
            idle_since=(known.idle_since or now) if idle else None,
            polled_at=now,
            tokens_per_s=rate,
            occupancy=occupancy,
        )
        return restarted

    def on_missed_poll(self, url: str) -> bool:
        """Record a missed poll; return True if the engine has missed several in a row and now counts as dead."""
        known = self.load(url)
        missed = known.missed_polls + 1
        is_dead = missed >= self._polls_to_death
        if is_dead:
            metrics = known.metrics.model_copy(update={"running_sequences": 0, "waiting_sequences": 0})
            known = replace(known, metrics=metrics, tokens_per_s=0.0, occupancy=0.0)
        self._loads[url] = replace(known, missed_polls=missed)
        return is_dead

    def is_late(self, url: str, waited_s: float) -> bool:
        """Return True if a poll's answer is late: after three times the usual time, at least `_LATE_S` seconds.

        Then the engine's rates become zero, since the last ones describe the past.
        """
        if waited_s <= max(_LATE_S, _LATE_TIMES * self._answers_s.get(url, 0.0)):
            return False
        self._loads[url] = replace(self.load(url), tokens_per_s=0.0, occupancy=0.0)
        return True

    def forget(self, url: str) -> None:
        """Drop the data of an engine that is no longer polled."""
        self._answers_s.pop(url, None)
        self.speeds.forget(url)
        self._loads.pop(url, None)
        self._polled_at.pop(url, None)
