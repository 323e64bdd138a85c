"""Sequential tests of one engine: do its log-probs and its samples still fit the trainer's distribution?

Both tests bet against the hypothesis that the engine is healthy (Shafer and Vovk 2019; Ramdas et al. 2023,
arXiv:2210.01948). The capital that a bet has made is its evidence. A healthy engine ever reaches the evidence `ALARM`
with probability at most 1/`ALARM`, however often one looks.

**Log-probs.** With d = engine − trainer and p the token's probability, a token's deviation is

    x = |d| / (1.1 − p)

since noise in the logits moves a likely token's log-prob less. A joining engine's first deviations are the baseline.
Later ones get a p-value: the upper bound (m + 2√m) / (n + 1), with m − 1 of n baseline deviations above x / `SLACK`.
Beyond the largest, the tail has index 1, heavier than any noise with a mean. What float32 may round has p-value 1. A
bet multiplies the capital by

    1 − q + q·ε·pvalue^(ε − 1)

whose mean is at most 1 if p-values are uniform; q is the share of tokens that a fault touches (1, 1/4, 1/32).

**Samples.** The bet on temperature aT multiplies the capital by π_aT(token) / π_T(token), whose mean is 1 if the engine
samples π_T. A truncation (top-p, top-k) or a penalty makes samples likelier or less likely, as a temperature does.

**Versions.** A fault may begin at any version, so the k-th version adds 1/(k (k + 1)) to the capital of each bet. These
sum to 1, so the bound holds for the whole life of the engine. Evidence persists from version to version.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]

#: Evidence at which an engine fails.
ALARM: Final = 1e4
#: Factors of the temperature on which the test of samples bets.
TILTS: Final = (0.6, 0.8, 0.9, 1.1, 1.25)
#: Pairs (q, ε) of the bets on log-probs.
_BETS: Final = np.array([(q, e) for q in (1.0, 1 / 4, 1 / 32) for e in (0.1, 0.4)])
#: Factor by which deviations may exceed those of the baseline, since noise differs between prompts.
SLACK: Final = 1.5
#: Deviations up to this may be rounding in float32, whose size depends on which rows are computed together. They prove
#: nothing, even if the baseline is exact.
_ROUNDING: Final = 1e-5
#: A version whose tokens raise the evidence by this factor is suspicious. Those of a healthy engine do so with
#: probability at most 1/`_SUSPICIOUS`.
_SUSPICIOUS: Final = 10.0
#: The largest deviation of an engine of which few tokens show a fault.
_EXACT: Final = 1e-4
#: Number of deviations in a whole baseline; and the fewest that allow a test.
_BASELINE: Final = 256
_LEAST: Final = 12
#: The largest change, in one version, of the factor that follows the noise; and its bounds. A frozen engine's
#: deviations grow faster by far.
_GROWTH: Final = 0.01
_MOST_GROWTH: Final = 8.0


class EProcess:
    """The capital of several bets, whose mean is the evidence. Not valid before the first `begin`."""

    def __init__(self, bets: int) -> None:
        self._capital = np.full(bets, -math.inf)  # logarithms
        self._versions = 0

    @property
    def log_evidence(self) -> float:
        return float(_log_mean(self._capital))

    @property
    def best(self) -> int:
        return int(np.argmax(self._capital))

    def begin(self) -> None:
        """Begin a version, at which a fault may begin."""
        self._versions += 1
        weight = -math.log(self._versions * (self._versions + 1))
        self._capital = np.logaddexp(self._capital, weight)

    def add(self, bets: Floats) -> int | None:
        """Multiply the capital by factors, given as logarithms [bets, N]; return the first token at which it alarms."""
        if bets.shape[1] == 0:
            return None
        capital = self._capital[:, None] + np.cumsum(bets, axis=1)
        self._capital = capital[:, -1]
        alarms = np.flatnonzero(_log_mean(capital) >= math.log(ALARM))
        return int(alarms[0]) if alarms.size else None


def _log_mean(logarithms: Floats) -> Floats:
    mean: Floats = np.logaddexp.reduce(logarithms, axis=0) - math.log(len(logarithms))
    return mean


def deviations(theirs: Floats, ours: Floats) -> Floats:
    """Return the deviations [N] of an engine's log-probs from the trainer's; infinite where one is not finite."""
    a, b = theirs.astype(np.float64), ours.astype(np.float64)
    with np.errstate(invalid="ignore"):
        scaled: Floats = np.abs(a - b) / (1.1 - np.exp(np.minimum(b, 0.0)))
    return np.where(np.isfinite(scaled), scaled, math.inf)


def distinct(ours: Floats) -> NDArray[np.intp]:
    """Return one token of each context: log-probs that agree to four decimals have equal noise."""
    return np.sort(np.unique(np.round(ours, 4), return_index=True)[1])


@dataclass(slots=True)
class EngineEvidence:
    """The evidence against one engine since it joined, by the tokens that it sampled."""

    logprobs: EProcess = field(default_factory=lambda: EProcess(len(_BETS)))
    samples: EProcess = field(default_factory=lambda: EProcess(len(TILTS)))
    growth: float = 1.0
    """Factor by which the noise has grown since the engine joined, at least 1."""
    is_suspicious: bool = False
    """True if more tokens of this version should be tested, since those tested so far are unlikely."""
    _baseline: Floats = field(default_factory=lambda: np.zeros(0))
    _tested: Floats = field(default_factory=lambda: np.zeros(0))
    """The trainer's log-probs of this version's tested tokens, to four decimals."""

    @property
    def is_exact(self) -> bool:
        """True if no deviation of the baseline is larger than rounding in float32."""
        return not self._baseline.size or bool(self._baseline[-1] <= _EXACT)

    def anchor(self, theirs: Floats, ours: Floats) -> None:
        """Add the log-probs of tokens that are known to be right to the baseline, unless it is whole."""
        room = _BASELINE - len(self._baseline)
        self._baseline = np.sort(np.append(self._baseline, deviations(theirs, ours)[distinct(ours)][:room]))

    def add(self, theirs: Floats, ours: Floats, *, more: bool = False) -> int | None:
        """Test the log-probs [N] by engine and trainer; return the first wrong token if the evidence alarms, else None.
        The first tokens of a new engine extend its baseline. `more` is True for further tokens of a version.
        """
        if not more:
            self.logprobs.begin()
            self._tested = np.zeros(0)
        self.is_suspicious = False
        if len(self._baseline) < _LEAST:
            self.anchor(theirs, ours)
            return None
        chosen = distinct(ours)
        chosen = chosen[~np.isin(np.round(ours[chosen], 4), self._tested)]
        self._tested = np.append(self._tested, np.round(ours[chosen], 4))
        x = deviations(theirs, ours)[chosen]
        before = self.logprobs.log_evidence
        (q, e), logs = _BETS.T[:, :, None], np.log(self._p_values(x))
        alarm = self.logprobs.add(np.log(1 - q + q * e * np.exp((e - 1) * logs)))
        self.is_suspicious = self.logprobs.log_evidence - before > math.log(_SUSPICIOUS)
        if alarm is not None:
            beyond = np.flatnonzero(x[: alarm + 1] > SLACK * self.growth * self._baseline[-1])
            return int(chosen[beyond[0] if beyond.size else alarm])
        if len(self._baseline) < _BASELINE:
            if not self.is_suspicious:
                self.anchor(theirs, ours)
        elif x.size:
            above = float(np.mean(x > self.growth * self._baseline[_BASELINE // 2]))
            self.growth = min(max(1.0, self.growth * math.exp(_GROWTH * (2 * above - 1))), _MOST_GROWTH)
        return None

    def add_samples(self, tilted: Floats, ours: Floats) -> int | None:
        """Test samples by the trainer's log-probs: at the temperatures `TILTS` · T [tilts, N], and at T [N]."""
        self.samples.begin()
        return self.samples.add(tilted.astype(np.float64) - ours)

    def _p_values(self, x: Floats) -> Floats:
        ordered, n = self._baseline, len(self._baseline)
        given = np.minimum(x / (SLACK * self.growth), np.finfo(np.float64).max)
        given = np.where(given <= _ROUNDING, 0.0, given)
        m = 1 + n - np.searchsorted(ordered, given, side="left")
        largest = max(float(ordered[-1]), _ROUNDING)
        tail = np.minimum(1.0, largest / np.maximum(given, largest))
        bounded: Floats = np.minimum(1.0, (m + 2 * np.sqrt(m)) / (n + 1)) * tail
        return bounded
