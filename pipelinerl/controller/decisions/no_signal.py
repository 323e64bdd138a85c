"""Rules for groups without signal: when they raise an alarm, and when they end a run that drops them. Pure.

A group has no signal if its rewards are equal, or if the recipe's filter refused it. A run has lost its signal when
every domain that it trains on, in proportion to its share of the mixture, has produced only such groups for several
steps' worth. A domain that still teaches, or that was just enabled, keeps the run going.

    steps' worth              effect
    half of the limit         the alarm `no_signal`, cleared by the next group with signal
    `run.no_signal_steps`     if such groups are dropped, the run ends: solved (status 0) or hopeless (status 1)

The run ends in order: its state is saved, and its last weights are published and evaluated. If groups without signal
are trained, the run continues to its last step, as in TRL.
"""

from __future__ import annotations

from typing import Final

from pipelinerl.controller.decisions.alarms import Alarm, AlarmKind
from pipelinerl.controller.decisions.directives import directive, ending
from pipelinerl.controller.state.effects import Effect, Record, Send
from pipelinerl.controller.state.run_state import RunPhase, RunState
from pipelinerl.controller.state.settings import ControllerSettings
from pipelinerl.enums import NoSignal
from pipelinerl.messages import NoSignalGroups

#: The fewest groups of a domain on which it counts as having lost its signal; matters for domains with a small share.
_LEAST_GROUPS: Final = 16
#: The run counts as solved if at least this share of its groups without signal had only correct answers.
_SOLVED: Final = 0.9
_KEY: Final = f"{AlarmKind.NO_SIGNAL}:"


def review(state: RunState, settings: ControllerSettings) -> list[Effect]:
    """Raise or clear the alarm, or end the run; called after each decision."""
    if state.phase is not RunPhase.TRAINING or ending(state, settings) is not None:
        return []
    steps = _steps_without_signal(state, only_refused=False)
    effects: list[Effect] = []
    if steps >= settings.no_signal_steps / 2 and _KEY not in state.watched.alarms:
        alarm = Alarm(kind=AlarmKind.NO_SIGNAL, what=_alarm_sentence(state))
        state.watched.alarms = state.watched.alarms | {_KEY: alarm.what}
        effects.append(Record("alarm", {"alarm": alarm.kind, "domain": "", "step": state.version, "what": alarm.what}))
    elif steps == 0 and _KEY in state.watched.alarms:
        state.watched.alarms = {key: what for key, what in state.watched.alarms.items() if key != _KEY}
        effects.append(Record("alarm_cleared", {"alarm": AlarmKind.NO_SIGNAL, "domain": "", "step": state.version}))
    evaluates = state.evaluations.current is not None or state.evaluations.due is not None
    dropped = _steps_without_signal(state, only_refused=settings.no_signal is NoSignal.TRAIN)
    if dropped >= settings.no_signal_steps and not evaluates:
        effects += _end(state, settings)
    return effects


def _end(state: RunState, settings: ControllerSettings) -> list[Effect]:
    """End the run at the next step boundary, as if an operator had stopped it."""
    counts = _sum(state)
    state.failing.hopeless = counts.right < _SOLVED * counts.total
    state.stop_reason = _hopeless_sentence(state, counts) if state.failing.hopeless else _solved_sentence(counts)
    if state.trainer.stop_sent:
        return []
    state.trainer.stop_sent = True
    return [Send(directive(state, settings, answers=f"stop-e{state.epoch}"))]


def _steps_without_signal(state: RunState, *, only_refused: bool) -> float:
    """Return how many steps' worth of groups without signal the run has had.

    The domain with the fewest such groups, relative to its share of the mixture, decides.
    """
    counts = state.account.consumed.no_signal
    if not counts:
        return 0.0
    weights = {domain: weight for domain, weight in state.knobs.domain_weights.items() if weight > 0}
    steps = []
    for domain, weight in weights.items():
        each = counts.get(domain, NoSignalGroups())
        number = each.refused if only_refused else each.total
        if number < _LEAST_GROUPS:
            return 0.0
        steps.append(number / (state.knobs.groups_per_step * weight / sum(weights.values())))
    return min(steps)


def _sum(state: RunState) -> NoSignalGroups:
    """Add up the groups without signal of all domains."""
    counts = list(state.account.consumed.no_signal.values())
    return NoSignalGroups(
        right=sum(each.right for each in counts),
        wrong=sum(each.wrong for each in counts),
        other=sum(each.other for each in counts),
        refused=sum(each.refused for each in counts),
    )


def _counts(counts: NoSignalGroups) -> str:
    words = {
        "all right": counts.right,
        "all wrong": counts.wrong,
        "otherwise without signal": counts.other,
        "refused by curation.filter": counts.refused,
    }
    return ", ".join(f"{number} {what}" for what, number in words.items() if number)


def _alarm_sentence(state: RunState) -> str:
    counts = _sum(state)
    return (
        f"no signal: the last {counts.total} groups have nothing to teach ({_counts(counts)}); change the problems, or "
        "check the reward with `pipelinerl check`"
    )


def _solved_sentence(counts: NoSignalGroups) -> str:
    return (
        f"solved: the last {counts.total} groups have nothing left to teach ({_counts(counts)}); use harder problems "
        "to continue, or check the reward with `pipelinerl check` if this is too early"
    )


def _hopeless_sentence(state: RunState, counts: NoSignalGroups) -> str:
    if counts.refused > counts.total / 2:
        advice = "loosen curation.filter"
    elif counts.wrong >= counts.total / 2:
        advice = (
            "take easier problems or a warm start, check the reward with `pipelinerl check`, or raise "
            "sampling.group_size"
        )
    else:
        advice = (
            "check with `pipelinerl check` that the reward distinguishes answers, or raise sampling.temperature or "
            "sampling.group_size"
        )
    return f"hopeless: the last {counts.total} groups have nothing to teach ({_counts(counts)}); {advice}"
