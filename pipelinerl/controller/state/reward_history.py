"""`RewardHistory`: a run's training rewards as far as the collapse guard needs them (`decisions/collapse.py`)."""

from __future__ import annotations

import math
from statistics import fmean, median
from typing import Final

import msgspec

#: Steps of a window, and steps in a row at which the condition must hold.
WINDOW: Final = 10
#: Standard errors of the difference of two window means.
FAR: Final = 6.0
#: Share of the gain, and of the reward at the start: many runs fall to half of that before they learn.
LOST: Final = 0.5
MOST: Final = 0.75
#: Differences between successive rewards that estimate the noise.
_DIFFERENCES: Final = 50
#: Standard deviation of a normal variable ÷ median absolute difference of two such variables.
_FROM_MEDIAN: Final = 1 / (0.6745 * math.sqrt(2))
#: The least noise of a reward: a run whose rewards hardly vary would else be called collapsed at any change.
_LEAST_NOISE: Final = 0.01


class RewardHistory(msgspec.Struct, kw_only=True):
    """The rewards so far, summarised for the collapse guard in bounded memory.

    Attributes:
        recent: the last `WINDOW` rewards, each with the version that sampled it. differences: between successive ones.
        first, best: mean of the first window and of the best one; `best_version` is the newest version in the latter.
        held: steps in a row at which the reward was collapsed.
    """

    recent: list[tuple[float, float]] = []
    differences: list[float] = []
    first: float | None = None
    best: float = -math.inf
    best_version: float = 0.0
    held: int = 0

    def note(self, version: float, reward: float) -> None:
        """Add the reward of a step, whose answers `version` sampled."""
        if self.recent:
            self.differences = [*self.differences, abs(reward - self.recent[-1][1])][-_DIFFERENCES:]
        self.recent = [*self.recent, (version, reward)][-WINDOW:]
        if len(self.recent) < WINDOW:
            return
        mean = fmean(each for _, each in self.recent)
        self.first = mean if self.first is None else self.first
        if mean > self.best:
            self.best, self.best_version = mean, self.recent[-1][0]
        noise = max(_LEAST_NOISE, median(self.differences) * _FROM_MEDIAN)
        far = FAR * noise * math.sqrt(2 / WINDOW)
        gain = self.best - self.first
        has_learned = gain > max(2 * far, LOST * abs(self.first))
        lost_gain = has_learned and mean <= self.best - LOST * gain
        below_start = mean < self.first - max(far, MOST * abs(self.first))
        is_low = mean < self.best - far and (lost_gain or below_start)
        self.held = self.held + 1 if is_low else 0

    def forget_after(self, version: int) -> None:
        """Forget the rewards of versions after `version`, which the run has abandoned, but not what it once reached."""
        self.recent = [each for each in self.recent if each[0] <= version]
        self.held = 0

    def in_words(self) -> str:
        """Return what the rewards were and are; empty if none are collapsed."""
        if not (self.held and self.recent):
            return ""
        mean, (oldest, _), (newest, _) = fmean(each for _, each in self.recent), self.recent[0], self.recent[-1]
        return (
            f"the reward of versions {oldest:.0f} to {newest:.0f} is {mean:.3g}; it was {self.best:.3g} up to version "
            f"{self.best_version:.0f} and {self.first:.3g} at first"
        )

    @property
    def is_collapsed(self) -> bool:
        """True if the reward has been low for `WINDOW` steps in a row."""
        return self.held >= WINDOW
