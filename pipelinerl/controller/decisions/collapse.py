"""The collapse guard: has the run lost what it had learned, by its own history?

A fixed threshold of a policy's entropy or of the effective sample size cries wolf, and so does a fall from the highest
reward. A run counts as collapsed only if its reward has

1. stayed down for many steps: the mean of the last `WINDOW` rewards, at `WINDOW` steps in a row,
2. left its own noise far behind: `FAR` standard errors below the best window mean, by the noise between steps, and
3. lost what counts: at least `LOST` of its gain, or `FAR` standard errors below the run's first window.

Held-out accuracy goes first. Two evaluations in a row that fulfil 2 and 3, by their 95 % intervals, are a collapse; one
newer evaluation that does not contradicts the training reward. Rewards are those of the version that sampled them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any, Final, NamedTuple

import msgspec

from pipelinerl.controller.state.evaluation import EvaluationResult
from pipelinerl.controller.state.run_state import WatchedStep

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
#: Figures that name a likely cause: means over this number of last steps, and their limits.
RECENT_STEPS: Final = 5
_MANY_TRUNCATED: Final = 0.2
_LOW_ENTROPY: Final = 0.1
_OLD: Final = 1.5
_LOW_ESS: Final = 0.7


class RewardHistory(msgspec.Struct, kw_only=True):
    """As much of the rewards so far as the guard needs, in bounded memory.

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
        self.held = self.held + 1 if self._is_low(mean) else 0

    def forget_after(self, version: int) -> None:
        """Forget the rewards of versions after `version`, which the run has abandoned, but not what it once reached."""
        self.recent = [each for each in self.recent if each[0] <= version]
        self.held = 0

    @property
    def is_collapsed(self) -> bool:
        """Whether the reward has been down for long enough."""
        return self.held >= WINDOW

    def _is_low(self, mean: float) -> bool:
        assert self.first is not None
        noise = max(_LEAST_NOISE, median(self.differences) * _FROM_MEDIAN)
        far = FAR * noise * math.sqrt(2 / WINDOW)
        gain = self.best - self.first
        has_learned = gain > max(2 * far, LOST * abs(self.first))
        lost_gain = has_learned and mean <= self.best - LOST * gain
        below_start = mean < self.first - max(far, MOST * abs(self.first))
        return mean < self.best - far and (lost_gain or below_start)


def is_collapsed(rewards: RewardHistory, results: Sequence[EvaluationResult]) -> bool:
    """Return whether the run is collapsed; `results` are its evaluations, oldest first."""
    accuracies = [_Accuracy(each.low, each.accuracy, each.high) for each in results if _is_usable(each)]
    if len(accuracies) >= 3 and all(_is_lost(accuracies[:-late], accuracies[-late]) for late in (1, 2)):
        return True
    newer = [each for each in results if _is_usable(each) and each.model_version > rewards.best_version]
    return rewards.is_collapsed and (not newer or _is_lost(accuracies[:-1], accuracies[-1]))


class _Accuracy(NamedTuple):
    low: Any
    mean: Any
    high: Any


def _is_usable(result: EvaluationResult) -> bool:
    return result.place == 0 and not result.incomplete and None not in (result.low, result.accuracy, result.high)


def _is_lost(before: Sequence[_Accuracy], newest: _Accuracy) -> bool:
    """Return whether the newest accuracy is below the first one, or has lost much of a gain, by their intervals."""
    if not before:
        return False
    first, best = before[0], max(before, key=lambda each: each.mean)
    lost_gain = best.low > first.high and newest.mean <= best.mean - LOST * (best.mean - first.mean)
    return newest.high < first.low or (lost_gain and newest.high < best.low)


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def likely_cause(steps: Sequence[WatchedStep], first_entropies: Sequence[float]) -> str:
    """Return the likely cause of a collapse and its remedy, from the figures of the last steps, oldest first."""
    recent = steps[-RECENT_STEPS:]
    truncated = sum(each.truncated for step in recent for each in step.domains.values())
    rollouts = sum(each.rollouts for step in recent for each in step.domains.values())
    if truncated > _MANY_TRUNCATED * rollouts:
        return f"{truncated / rollouts:.0%} of the answers hit the token limit; raise max_tokens or penalise length"
    entropy = mean_of([step.entropy for step in recent])
    if entropy is not None and first_entropies and entropy < _LOW_ENTROPY * fmean(first_entropies):
        return f"the entropy fell from {fmean(first_entropies):.3g} to {entropy:.3g} nats; add an entropy term"
    age, ess = mean_of([step.age for step in recent]), mean_of([step.ess for step in recent])
    if age is not None and ess is not None and age > _OLD and ess < _LOW_ESS:
        return f"samples are {age:.1f} versions old and their effective size is {ess:.0%}; lower k or the learning rate"
    return "most likely the learning rate is too high; halve it"
