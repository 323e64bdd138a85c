"""`Gathering` decides when sequences that wait join the rows that a decode loop runs.

A prefill delays all running rows, and part of the delay does not depend on its tokens: launches, transfers, and the
decode step that could not start early. Answers of different lengths end one by one, so that a prefill for each would
come at nearly every step. The loop rather leaves free rows idle until this has cost as many row-seconds as a prefill's
fixed delay:

    Σ idle rows · seconds of a step ≥ running rows · fixed seconds of a prefill

Total cost is least where both costs are equal, if rows end at a steady rate (the economic lot size of Harris, 1913).
"""

from __future__ import annotations

from typing import Final

#: Prefills before the first estimate, of which the first one is slow for other reasons.
_LEAST_PREFILLS: Final = 5
#: The weight of each prefill relative to the one after it.
_DECAY: Final = 0.95
#: Most steps that a free row waits, so that a wrong estimate cannot starve it.
_MOST_STEPS: Final = 64


class Gathering:
    """Measures steps and prefills of one loop, and tells when sequences join."""

    def __init__(self) -> None:
        self._idle_s = 0.0
        self._steps = 0
        self._prefills = 0
        # Sums over prefills, weighted, of 1, tokens, seconds, tokens², tokens · seconds.
        self._sums: tuple[float, ...] = (0.0,) * 5

    @property
    def fixed_s(self) -> float:
        """The seconds of a prefill without tokens, by a line through the measured prefills; 0 if unknown."""
        count, tokens, seconds, squares, products = self._sums
        spread = count * squares - tokens * tokens
        if self._prefills < _LEAST_PREFILLS or spread <= 1e-6 * count * squares:
            return 0.0
        per_token = max(0.0, (count * products - tokens * seconds) / spread)
        return max(0.0, (seconds - per_token * tokens) / count)

    def may_join(self, running: int) -> bool:
        """Return whether sequences that wait join now, `running` rows being in use."""
        return self._steps >= _MOST_STEPS or self._idle_s >= running * self.fixed_s

    def count_step(self, seconds: float, idle: int) -> None:
        """Count a decode step, during which `idle` rows were free for sequences that wait."""
        if idle:
            self._idle_s += idle * seconds
            self._steps += 1

    def count_prefill(self, tokens: int, seconds: float) -> None:
        """Count that sequences joined, with a prefill of `tokens` tokens; rows that are idle from now on wait anew."""
        self._idle_s, self._steps = 0.0, 0
        self._prefills += tokens > 0
        if tokens > 0 and self._prefills > 1:
            new = 1.0, tokens, seconds, tokens * tokens, tokens * seconds
            self._sums = tuple(_DECAY * old + each for old, each in zip(self._sums, new, strict=True))
