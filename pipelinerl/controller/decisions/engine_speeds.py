"""`EngineSpeeds`: how fast each engine is, relative to its fleet, measured from decode steps. Pure: no clock, no I/O.

A poll gives the seconds per decode step and the rows per step since the last poll. A step with more rows takes longer,
so the seconds alone would make a busy engine look slow, and tokens per second an idle one. Either would feed back into
the work that the engine gets. So the fleet's steps also show by which power of the rows a step grows, from 0 (the
weights' memory is read once for any number of rows) to 1 (each row costs the same):

    log(step seconds) = power · log(rows) − log(speed of the engine)

The seconds are those of the engine's clock, so they include the time in which its process was suspended.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_high
from typing import Final

#: Weight of a poll relative to the next one: an estimate follows a change within about ten polls.
_FADES: Final = 0.9
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


@dataclass(slots=True)
class _Means:
    """Faded sums over polls of an engine: of weights, x = log(rows), y = log(seconds of a step), x², and xy."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.weight, self.x, self.y = _FADES * self.weight + 1, _FADES * self.x + x, _FADES * self.y + y
        self.xx, self.xy = _FADES * self.xx + x * x, _FADES * self.xy + x * y

    def variance(self) -> float:
        return max(0.0, self.xx / self.weight - (self.x / self.weight) ** 2)

    def covariance(self) -> float:
        return self.xy / self.weight - self.x * self.y / self.weight**2


class EngineSpeeds:
    """Speeds of engines by base URL."""

    def __init__(self) -> None:
        self._means: dict[str, _Means] = {}

    def note(self, url: str, *, steps: float, rows: float, busy_s: float) -> None:
        """Record `steps` decode steps with `rows` rows in total, which kept the engine busy for `busy_s` seconds."""
        if steps >= _LEAST_STEPS and rows > 0 and busy_s > 0:
            self._means.setdefault(url, _Means()).add(math.log(rows / steps), math.log(busy_s / steps))

    def forget(self, url: str) -> None:
        """Drop the measurements of an engine."""
        self._means.pop(url, None)

    def of(self, urls: Iterable[str]) -> dict[str, float]:
        """Return the speeds of those of `urls` that differ from the fleet's, as a factor: 0.5 is half as fast.

        The fleet's speed is the median, of two engines the faster one. Engines without enough measurements are missing.
        """
        means = {url: self._means[url] for url in urls if url in self._means and self._means[url].weight >= _FEW}
        if len(means) < 2:
            return {}
        covariance = sum(each.covariance() for each in means.values()) + _POWER * _VARIANCE
        power = min(1.0, max(0.0, covariance / (sum(each.variance() for each in means.values()) + _VARIANCE)))
        speeds = {url: (power * each.x - each.y) / each.weight for url, each in means.items()}
        usual = median_high(speeds.values())
        factors = {url: min(_MOST, max(1 / _MOST, math.exp(speed - usual))) for url, speed in speeds.items()}
        return {url: round(factor, 2) for url, factor in factors.items() if not 1 / ALIKE < factor < ALIKE}
