"""Small running numbers: an exponential mean, a rate over a sliding window, and Prometheus' text form.

Each takes its clock as an argument, so that tests need not wait. Nothing here is shared between threads.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import final


@final
class ExponentialMean:
    """Mean in which a value's weight halves every `half_life` further values; unbiased from the first one on.

    Example: half_life 1, values 0, 3 → (0·½ + 3·1) / (½ + 1) = 2.
    """

    def __init__(self, half_life: float) -> None:
        if half_life <= 0:
            raise ValueError(f"half_life must be positive, got {half_life}")
        self._decay = 0.5 ** (1.0 / half_life)
        self._sum = 0.0
        self._weight = 0.0

    def add(self, value: float) -> float:
        """Take one value in; returns the new mean."""
        self._sum = self._sum * self._decay + value
        self._weight = self._weight * self._decay + 1.0
        return self.value

    @property
    def value(self) -> float:
        """The mean, or NaN before the first value."""
        return self._sum / self._weight if self._weight else math.nan


@final
class Rate:
    """Amount per second over the last `window_s` seconds (less where less has passed since the first amount)."""

    def __init__(self, window_s: float = 10.0, *, clock: Callable[[], float] = time.monotonic) -> None:
        if window_s <= 0:
            raise ValueError(f"window_s must be positive, got {window_s}")
        self._window_s = window_s
        self._clock = clock
        self._since = clock()
        self._amounts: deque[tuple[float, float]] = deque()
        self._sum = 0.0

    def add(self, amount: float = 1.0) -> None:
        """Count `amount` now."""
        self._amounts.append((self._clock(), amount))
        self._sum += amount

    @property
    def per_second(self) -> float:
        """The rate now; 0 before any time has passed."""
        now = self._clock()
        while self._amounts and now - self._amounts[0][0] > self._window_s:
            self._sum -= self._amounts.popleft()[1]
        elapsed = min(now - self._since, self._window_s)
        return self._sum / elapsed if elapsed > 0 else 0.0


def prometheus_text(values: Mapping[str, float], *, prefix: str, labels: Mapping[str, str] | None = None) -> str:
    """Prometheus' text exposition format, version 0.0.4.

    A name that ends in `_total` is a counter, any other a gauge. Label values are escaped as the format demands.
    """
    tail = ""
    if labels:
        tail = "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"
    lines = []
    for name, value in values.items():
        full = f"{prefix}_{name}"
        lines.append(f"# TYPE {full} {'counter' if name.endswith('_total') else 'gauge'}")
        lines.append(f"{full}{tail} {value:.17g}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
