"""The collapse guard: has the run lost what it had learned, by its own history?

A fixed threshold of a policy's entropy or of the effective sample size cries wolf, and so does a fall from the highest
reward. A run counts as collapsed only if its reward has

1. stayed down for many steps: the mean of the last `WINDOW` rewards, at `WINDOW` steps in a row,
2. left its own noise far behind: `FAR` standard errors below the best window mean, by the noise between steps, and
3. lost what counts: `LOST` of a clear gain, or `MOST` of what it started with, since many runs fall to half of that
   before they learn.

Held-out accuracy goes first. Two evaluations in a row that fulfil 2 and 3, by their 95 % intervals, are a collapse; one
newer evaluation that does not contradicts the training reward. Rewards are those of the version that sampled them.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, Final

from pipelinerl.controller.decisions.step_review import (
    COLLAPSE,
    LOW_ENTROPY,
    RECENT_STEPS,
    TRUNCATED_SHARE,
    Alarm,
    mean_of,
    settle_alarm,
)
from pipelinerl.controller.state.evaluation import EvaluationResult
from pipelinerl.controller.state.inputs_and_effects import Effect
from pipelinerl.controller.state.reward_history import LOST, RewardHistory
from pipelinerl.controller.state.run_state import RunState, WatchedStep

#: Samples of at least this age whose effective size is below `_LOW_ESS` are a likely cause.
_OLD: Final = 1.5
_LOW_ESS: Final = 0.7


def guard(state: RunState, *, now: float) -> list[Effect]:
    """Raise or clear the alarm that the run has collapsed, after a step."""
    rewards, watched = state.watched.rewards, state.watched
    alarm = None
    if is_collapsed(rewards, state.evaluations.results):
        fall = rewards.in_words()
        if not fall:
            known = [each for each in state.evaluations.results if _is_usable(each)]
            best = max(known, key=lambda each: each.accuracy or 0.0)
            fall = (
                f"the held-out accuracy of version {known[-1].model_version} is {known[-1].accuracy:.1%}; it was "
                f"{best.accuracy:.1%} at version {best.model_version} and {known[0].accuracy:.1%} at first"
            )
        cause = likely_cause(watched.recent, watched.first_entropies)
        alarm = Alarm("collapse", f"collapse: {fall}; {cause}")
    return settle_alarm(watched, COLLAPSE, alarm, step=state.version, now=now, raise_after=1)


def is_collapsed(rewards: RewardHistory, results: Sequence[EvaluationResult]) -> bool:
    """Return whether the run is collapsed; `results` are its evaluations, oldest first."""
    usable = [each for each in results if _is_usable(each)]
    if len(usable) >= 3 and all(_is_lost(usable[:-late], usable[-late]) for late in (1, 2)):
        return True
    if not rewards.is_collapsed:
        return False
    # An evaluation of weights from before the fall does not contradict it.
    since = rewards.recent[0][0]
    return all(each.model_version < since for each in usable) or _is_lost(usable[:-1], usable[-1])


def _is_usable(result: EvaluationResult) -> bool:
    return result.place == 0 and not result.incomplete and None not in (result.low, result.accuracy, result.high)


def _is_lost(before: Sequence[Any], newest: Any) -> bool:
    """Return whether the newest result is below the first one, or has lost much of a gain, by their intervals."""
    if not before:
        return False
    first, best = before[0], max(before, key=lambda each: each.accuracy)
    gain = best.accuracy - first.accuracy
    lost_gain = best.low > first.high and newest.accuracy <= best.accuracy - LOST * gain
    return newest.high < first.low or (lost_gain and newest.high < best.low)


def likely_cause(steps: Sequence[WatchedStep], first_entropies: Sequence[float]) -> str:
    """Return the likely cause of a collapse and its remedy, from the figures of the last steps, oldest first."""
    recent = steps[-RECENT_STEPS:]
    truncated = sum(each.truncated for step in recent for each in step.domains.values())
    rollouts = sum(each.rollouts for step in recent for each in step.domains.values())
    if truncated > TRUNCATED_SHARE * rollouts:
        return f"{truncated / rollouts:.0%} of the answers hit the token limit; raise max_tokens or penalise length"
    entropy = mean_of([step.entropy for step in recent])
    if entropy is not None and first_entropies and entropy < LOW_ENTROPY * fmean(first_entropies):
        return f"the entropy fell from {fmean(first_entropies):.3g} to {entropy:.3g} nats; add an entropy term"
    age, ess = mean_of([step.age for step in recent]), mean_of([step.ess for step in recent])
    if age is not None and ess is not None and age > _OLD and ess < _LOW_ESS:
        return f"samples are {age:.1f} versions old and their effective size is {ess:.0%}; lower k or the learning rate"
    return "most likely the learning rate is too high; halve it"
