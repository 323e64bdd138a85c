"""Alarms: warnings about the health of a run. Pure; all thresholds are defined here.

    entropy     entropy of recent steps is below a tenth of that of the first steps, and a tenth or more of the answers
                are wrong: there is still something to learn, and exploration has collapsed
    length      answers of recent steps are twice as long as those of the steps before them
    truncated   more than a fifth of a domain's rollouts hit the token limit
    stale       more than a tenth of a domain's groups are dropped as stale
    no_signal   all recent groups have equal rewards; `no_signal.py` also raises and clears it between steps

An alarm is raised once. It is cleared when its measure has recovered by a fifth of the threshold, so that a measure
near the threshold does not raise it repeatedly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Final

from pipelinerl.controller.state.watched_steps import FIRST_STEPS, DomainCounts, WatchedStep


class AlarmKind(StrEnum):
    """The measure that raised an alarm."""

    ENTROPY = "entropy"
    LENGTH = "length"
    TRUNCATED = "truncated"
    STALE = "stale"
    NO_SIGNAL = "no_signal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Thresholds of the alarms.

    Attributes:
        recent_steps: number of recent steps over which a measure is averaged.
        entropy: the entropy alarm is raised if recent entropy is below this share of the entropy of the run's first
            steps.
        right: the entropy alarm is raised only if fewer than this share of the answers are correct.
        length: the length alarm is raised if the mean length of recent steps is this multiple of the mean length of
            the `length_steps` before them.
        truncated, stale: the alarm is raised if more than this share of a domain's rollouts or groups is affected.
        enough: the fewest rollouts, or groups, of a domain on which an alarm may be raised.
        back: an alarm is cleared when its measure is better than the threshold by this share of the threshold.
    """

    recent_steps: int = 5
    entropy: float = 0.1
    right: float = 0.9
    length: float = 2.0
    length_steps: int = 20
    truncated: float = 0.2
    stale: float = 0.1
    enough: int = 20
    back: float = 0.2


THRESHOLDS: Final = Thresholds()


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One alarm: `what` is a sentence with the measured figures and a remedy."""

    kind: AlarmKind
    what: str
    domain: str = ""

    @property
    def key(self) -> str:
        """The kind and domain, by which an alarm that is already raised is recognised."""
        return f"{self.kind}:{self.domain}"


def alarms_of(
    steps: Sequence[WatchedStep],
    *,
    first_entropies: Sequence[float],
    raised: Mapping[str, str],
    thresholds: Thresholds = THRESHOLDS,
) -> list[Alarm]:
    """Return the alarms that are active after the newest of `steps` (oldest first).

    `raised` are the alarms that were active before the newest step.
    """
    if len(steps) < thresholds.recent_steps:
        return []
    return [
        *_entropy(steps, first_entropies, raised, thresholds),
        *_length(steps, raised, thresholds),
        *_shares(steps, raised, thresholds),
    ]


def _entropy(
    steps: Sequence[WatchedStep], first: Sequence[float], raised: Mapping[str, str], at: Thresholds
) -> Iterator[Alarm]:
    recent = steps[-at.recent_steps :]
    entropy, right = _mean([step.entropy for step in recent]), _mean([step.right for step in recent])
    if entropy is None or len(first) < FIRST_STEPS:
        return
    begun, slack = fmean(first), 1 + at.back * (f"{AlarmKind.ENTROPY}:" in raised)
    if entropy < at.entropy * slack * begun and (right is None or right < at.right):
        yield Alarm(
            kind=AlarmKind.ENTROPY,
            what=f"entropy collapse: {entropy:.3g} nats per token, {begun:.3g} at the start of the run, and "
            f"{'an unknown share' if right is None else f'only {right:.0%}'} of the answers is correct; lower the "
            "learning rate, raise epsilon_high, or add an entropy term",
        )


def _length(steps: Sequence[WatchedStep], raised: Mapping[str, str], at: Thresholds) -> Iterator[Alarm]:
    if len(steps) < at.recent_steps + at.length_steps:
        return
    recent = _mean([step.length for step in steps[-at.recent_steps :]])
    before = _mean([step.length for step in steps[-at.recent_steps - at.length_steps : -at.recent_steps]])
    slack = 1 - at.back * (f"{AlarmKind.LENGTH}:" in raised)
    if recent is not None and before is not None and recent > at.length * slack * before:
        yield Alarm(
            kind=AlarmKind.LENGTH,
            what=f"length explosion: answers of {recent:,.0f} tokens, {before:,.0f} in the {at.length_steps} steps "
            "before; look at `pipelinerl samples --worst`, or penalise length: domains.reward.overlong_tokens",
        )


def _shares(steps: Sequence[WatchedStep], raised: Mapping[str, str], at: Thresholds) -> Iterator[Alarm]:
    recent = steps[-at.recent_steps :]
    for domain in sorted({name for step in recent for name in step.domains}):
        counts = [step.domains.get(domain, DomainCounts()) for step in recent]
        rollouts, groups = sum(each.rollouts for each in counts), sum(each.groups + each.stale for each in counts)
        truncated, stale = sum(each.truncated for each in counts), sum(each.stale for each in counts)
        if rollouts >= at.enough and truncated / rollouts > _limit(
            at.truncated, AlarmKind.TRUNCATED, domain, raised, at
        ):
            yield Alarm(
                kind=AlarmKind.TRUNCATED,
                domain=domain,
                what=f"{truncated / rollouts:.0%} of the answers of {domain} hit the token limit; raise "
                'max_tokens, or keep them out of the loss: training.truncated = "mask"',
            )
        if groups >= at.enough and stale / groups > _limit(at.stale, AlarmKind.STALE, domain, raised, at):
            yield Alarm(
                kind=AlarmKind.STALE,
                domain=domain,
                what=f"{stale / groups:.0%} of the groups of {domain} are dropped as stale; raise k, or lower "
                "groups_in_flight",
            )


def _limit(threshold: float, kind: AlarmKind, domain: str, raised: Mapping[str, str], at: Thresholds) -> float:
    return threshold * (1 - at.back * (f"{kind}:{domain}" in raised))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
