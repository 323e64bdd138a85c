"""Review of each step: metrics by domain, alarms, and the end of a run whose groups have no learning signal.

To the trainer's metrics of a domain, the controller adds the number of groups that actors gave up as stale, and the
verifier's work since the previous step: `verified` is the number of verified answers, `verifier_s` the seconds per
answer, and `verifier_errors` the number of errors and timeouts. A domain of multi-turn episodes also has the number of
`episodes` and `environment_s`, the seconds per episode spent outside the model. A domain with tools also has the counts
`calls_parsed`, `calls_malformed` and `tool_errors`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Final, NamedTuple

import msgspec

from pipelinerl.controller.decisions.directives import directive, ending
from pipelinerl.controller.state.inputs_and_effects import Effect, Record, Send
from pipelinerl.controller.state.run_state import (
    FIRST_STEPS,
    WINDOW,
    AlarmClock,
    ControllerSettings,
    DomainCounts,
    RunPhase,
    RunState,
    Sampled,
    WatchedStep,
    WatchedSteps,
    discarded_over,
)
from pipelinerl.enums import NoSignal
from pipelinerl.messages import ActorAlive, GroupOutdated, NoSignalGroups, StepDone, VerifierFigures

#: The most groups per step whose stage timings are included in the step's event.
MOST_STAGES: Final = 4

#: Fields of `VerifierFigures` that are summed over actors.
_TOTALS: Final = (
    "judged", "errors", "timeouts", "seconds", "tool_episodes", "calls_parsed", "calls_malformed", "episodes",
    "environment_s", "tool_errors",
)  # fmt: skip

Figures = Mapping[str, Mapping[str, float]]

#: Steps in a row in which an alarm's condition must hold before it is raised.
RAISE_STEPS: Final = 3
#: An alarm is cleared after this many steps, and this many seconds, in which its condition did not hold.
CALM_STEPS: Final = 5
CALM_S: Final = 60.0


class Alarm(NamedTuple):
    """One alarm: `what` is a sentence with the measured values and a remedy; `kind` is the metric that raised it."""

    kind: str
    what: str
    domain: str = ""

    @property
    def key(self) -> str:
        """The alarm's identity, made of its kind and its domain."""
        return f"{self.kind}:{self.domain}"


def step_taken(state: RunState, report: StepDone, *, lag: str, now: float) -> list[Effect]:
    """Return the step's event, with the sentence `lag`, and the events of alarms that it raises or clears."""
    version, watched = report.model_version, state.watched
    watched.by_domain = _by_domain(state, report.by_domain)
    watched.by_tag = report.by_tag
    by = {"by_domain": watched.by_domain, "by_tag": watched.by_tag}
    several = {"updates": report.updates} if report.updates else {}
    step = {"step": version, "model_version": version, "orders": report.orders}
    ahead = {"lag": lag, "lag_cost": state.lag.cost, "steps_ahead": state.lag.ahead, "j": state.bounds.j}
    stages, watched.stages = msgspec.to_builtins(watched.stages), []
    _remember(state, report)
    effects: list[Effect] = [Record("step", step | report.stats | several | by | ahead | {"stages": stages})]
    alarms = alarms_of(watched.recent, first_entropies=watched.first_entropies, raised=watched.alarms)
    found = {alarm.key: alarm for alarm in alarms}
    for key in sorted((found.keys() | watched.alarms.keys() | watched.alarm_clocks.keys()) - {NO_SIGNAL, COLLAPSE}):
        effects += settle_alarm(watched, key, found.get(key), step=version, now=now)
    return effects


def note_stages(state: RunState, report: ActorAlive) -> None:
    """Keep the stage timings of the first `MOST_STAGES` groups that actors report, for the step's event."""
    free = MOST_STAGES - len(state.watched.stages)
    if free > 0 and report.stages:
        state.watched.stages = [*state.watched.stages, *report.stages[:free]]


def note_outdated(state: RunState, report: GroupOutdated) -> None:
    """Count a group that an actor gave up as stale, for the next step's metrics."""
    if report.domain in state.knobs.domain_weights:
        state.watched.outdated[report.domain] = state.watched.outdated.get(report.domain, 0) + 1


def settle_alarm(
    watched: WatchedSteps, key: str, alarm: Alarm | None, *, step: int, now: float, raise_after: int = RAISE_STEPS
) -> list[Effect]:
    """Raise or clear the alarm `key`; `alarm` is given if its condition holds now. Return the event, if any.

    An alarm is raised after its condition has held `raise_after` times in a row. It is cleared after `CALM_STEPS` steps
    and `CALM_S` seconds without the condition, so a measure at its threshold gives one alarm and not one per crossing.
    """
    clock = watched.alarm_clocks.get(key, AlarmClock())
    if alarm is not None:
        watched.alarm_clocks[key] = AlarmClock(held=clock.held + 1)
        if key not in watched.alarms and clock.held + 1 < raise_after:
            return []
        is_new = key not in watched.alarms
        watched.alarms[key] = alarm.what
        fields = {"alarm": alarm.kind, "domain": alarm.domain, "step": step, "what": alarm.what}
        return [Record("alarm", fields)] if is_new else []
    if key not in watched.alarms:
        watched.alarm_clocks.pop(key, None)
    elif clock.calm_since is None:
        watched.alarm_clocks[key] = AlarmClock(calm_since=now, calm_step=step)
    elif now - clock.calm_since >= CALM_S and step - clock.calm_step >= CALM_STEPS:
        del watched.alarms[key], watched.alarm_clocks[key]
        kind, _, domain = key.partition(":")
        return [Record("alarm_cleared", {"alarm": kind, "domain": domain, "step": step})]
    return []


def _by_domain(state: RunState, reported: Figures) -> dict[str, dict[str, float]]:
    watched = state.watched
    before, watched.verified = watched.verified, {}
    for alive, _ in state.actors.values():
        for domain, totals in alive.verifiers.items():
            known = watched.verified.get(domain, VerifierFigures())
            sums = {name: getattr(known, name) + getattr(totals, name) for name in _TOTALS}
            watched.verified[domain] = VerifierFigures(**sums)
    outdated = watched.outdated
    figures = {domain: dict(reported.get(domain, {})) for domain in sorted({*reported, *outdated})}
    for domain, each in state.cooldown.take_figures().items():
        figures.setdefault(domain, {}).update(each)
    for domain, each in figures.items():
        each["stale_groups"] = each.get("stale_groups", 0) + outdated.get(domain, 0)
        each["stale"] = each["stale_groups"] / max(1, each["stale_groups"] + each.get("groups", 0))
        if domain in watched.verified:
            each |= _since(watched.verified[domain], before.get(domain, VerifierFigures()))
    return figures


def _since(now: VerifierFigures, before: VerifierFigures) -> dict[str, float]:
    """Return the increase of the counters since `before`; if a restarted actor has reset its counters, since 0."""
    if now.judged < before.judged or now.seconds < before.seconds:
        before = VerifierFigures()
    failed = now.errors + now.timeouts - before.errors - before.timeouts
    verified = now.judged - before.judged + failed
    figures = {"verified": float(verified), "verifier_errors": float(max(0, failed))}
    if now.tool_episodes:
        figures["calls_parsed"] = float(max(0, now.calls_parsed - before.calls_parsed))
        figures["calls_malformed"] = float(max(0, now.calls_malformed - before.calls_malformed))
        figures["tool_errors"] = float(max(0, now.tool_errors - before.tool_errors))
    if (episodes := now.episodes - before.episodes) > 0:
        figures["episodes"] = float(episodes)
        figures["environment_s"] = (now.environment_s - before.environment_s) / episodes
    return figures | ({"verifier_s": (now.seconds - before.seconds) / verified} if verified > 0 else {})


def _remember(state: RunState, report: StepDone) -> None:
    watched, stats = state.watched, report.stats
    domains = {
        domain: DomainCounts(
            rollouts=figures.get("rollouts", 0.0),
            truncated=figures.get("truncated", 0.0) * figures.get("rollouts", 0.0),
            groups=figures.get("groups", 0.0),
            stale=figures.get("stale_groups", 0.0),
            unjudged=figures.get("unjudged", 0.0) * figures.get("rollouts", 0.0),
        )
        for domain, figures in watched.by_domain.items()
    }
    before, watched.stale = (watched.stale, Sampled(stats.get("stale_answers", 0.0), stats.get("stale_tokens", 0.0)))
    if watched.stale.tokens < before.tokens:  # another trainer counts from 0
        before = Sampled()
    step = WatchedStep(
        step=report.model_version,
        trained=Sampled(stats.get("rollouts", 0.0), stats.get("sampled_tokens", 0.0)),
        stale=Sampled(watched.stale.answers - before.answers, watched.stale.tokens - before.tokens),
        given_up=sum(watched.outdated.values()),
        entropy=stats.get("entropy"),
        right=stats.get("accuracy"),
        length=stats.get("length_mean"),
        age=stats.get("staleness_mean"),
        ess=stats.get("ess"),
        domains=domains,
    )
    watched.outdated = {}
    if "reward" in stats:
        watched.rewards.note(stats.get("sampled_version", step.step - (step.age or 1.0)), stats["reward"])
    watched.recent = [*watched.recent, step][-WINDOW:]
    if step.entropy is not None and len(watched.first_entropies) < FIRST_STEPS:
        watched.first_entropies = [*watched.first_entropies, step.entropy]


#: The metrics of alarms are means over this number of newest steps.
RECENT_STEPS: Final = 5
#: An alarm is raised if the entropy falls below this share of the entropy of the run's first steps.
LOW_ENTROPY: Final = 0.1
#: Low entropy raises no alarm if at least this share of the answers is correct.
_MOSTLY_RIGHT: Final = 0.9
#: An alarm is raised if the mean length exceeds this multiple of the mean length of the `_EARLIER_STEPS` before.
_LENGTH_GROWTH: Final = 2.0
_EARLIER_STEPS: Final = 20
#: An alarm is raised if more than this share of the tokens of the last `WINDOW` steps is dropped as stale.
_DISCARDED_SHARE: Final = 0.005
#: An alarm is raised if more than this share of a domain's rollouts is truncated.
TRUNCATED_SHARE: Final = 0.2
#: Alarms of a domain: the kind (a field of `DomainCounts`), the share above which it is raised, and its sentence.
_OF_A_DOMAIN: Final = (
    (
        "truncated", TRUNCATED_SHARE, "{share:.0%} of the answers of {domain} hit the token limit; raise max_tokens, "
        'or keep them out of the loss: training.truncated = "mask"',
    ),
    (
        "unjudged", 0.05, "{share:.0%} of the answers of {domain} have no verdict and are left out of its reward; look "
        "at the reasons with `pipelinerl samples`, and let a reward function return 0.0 for a wrong answer, not None",
    ),
    ("stale", 0.1, "{share:.0%} of the groups of {domain} are dropped as stale; raise k, or lower groups_in_flight"),
)  # fmt: skip
#: A domain with fewer rollouts (or groups, for stale groups) than this raises no alarm.
_ENOUGH: Final = 20
#: An alarm is cleared when its metric is better than the threshold by this share of the threshold.
_CLEARANCE: Final = 0.2


def alarms_of(
    steps: Sequence[WatchedStep], *, first_entropies: Sequence[float], raised: Mapping[str, str]
) -> Iterator[Alarm]:
    """Yield the alarms active after the newest of `steps` (oldest first); `raised` are those active before it."""
    if len(steps) < RECENT_STEPS:
        return

    def clearance(kind: str, domain: str = "") -> float:
        return _CLEARANCE if f"{kind}:{domain}" in raised else 0.0

    recent, earlier = steps[-RECENT_STEPS:], steps[-RECENT_STEPS - _EARLIER_STEPS : -RECENT_STEPS]
    entropy, right = mean_of([step.entropy for step in recent]), mean_of([step.right for step in recent])
    if entropy is not None and len(first_entropies) >= FIRST_STEPS and (right is None or right < _MOSTLY_RIGHT):
        begun = fmean(first_entropies)
        if entropy < LOW_ENTROPY * (1 + clearance("entropy")) * begun:
            what = (
                f"entropy collapse: {entropy:.3g} nats per token, {begun:.3g} at the start of the run, and "
                f"{'an unknown share' if right is None else f'only {right:.0%}'} of the answers is correct; lower the "
                "learning rate, raise epsilon_high, or add an entropy term"
            )
            yield Alarm("entropy", what)
    length, before = mean_of([step.length for step in recent]), mean_of([step.length for step in earlier])
    most = _LENGTH_GROWTH * (1 - clearance("length"))
    if len(earlier) == _EARLIER_STEPS and length is not None and before is not None and length > most * before:
        what = (
            f"length explosion: answers of {length:,.0f} tokens, {before:,.0f} in the {_EARLIER_STEPS} steps before; "
            "look at `pipelinerl samples --worst`, or penalise length: domains.reward.overlong_tokens"
        )
        yield Alarm("length", what)
    discarded, length_ratio = discarded_over(steps)
    if len(steps) == WINDOW and discarded > _DISCARDED_SHARE * (1 - clearance("discard")):
        what = (
            f"{discarded:.1%} of the sampled tokens are too old to train on and are dropped, which favours short "
            f"answers: trained answers are {length_ratio:.1%} as long as sampled ones; raise staleness.k, or "
            'wait for late groups: staleness.overdue = "wait"'
        )
        yield Alarm("discard", what)
    for domain in sorted({name for step in recent for name in step.domains}):
        counts = [step.domains.get(domain, DomainCounts()) for step in recent]
        rollouts, groups = sum(each.rollouts for each in counts), sum(each.groups + each.stale for each in counts)
        for kind, most, sentence in _OF_A_DOMAIN:
            number, of = sum(getattr(each, kind) for each in counts), groups if kind == "stale" else rollouts
            if of >= _ENOUGH and number / of > most * (1 - clearance(kind, domain)):
                yield Alarm(kind, sentence.format(share=number / of, domain=domain), domain)


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values; None if none is known."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


#: A domain counts as without signal only after this many groups without signal, however small its weight.
_LEAST_GROUPS: Final = 16
#: A run that ends for lack of signal counts as solved if at least this share of its groups without signal have only
#: correct answers.
_SOLVED: Final = 0.9
#: Keys of alarms that are not settled with a step's others: that of `review`, and that of `collapse.py`.
NO_SIGNAL: Final = "no_signal:"
COLLAPSE: Final = "collapse:"


def review(state: RunState, settings: ControllerSettings, *, now: float) -> list[Effect]:
    """Raise or clear the alarm for missing signal, or end the run because of it; called after each decision."""
    if state.phase is not RunPhase.TRAINING or ending(state, settings) is not None:
        return []
    steps = _steps_without_signal(state, only_refused=False)
    effects: list[Effect] = []
    holds = steps >= settings.run.no_signal_steps / 2
    by_domain = state.account.consumed.no_signal.values()
    reasons = NoSignalGroups.__struct_fields__
    counts = NoSignalGroups(**{reason: sum(getattr(each, reason) for each in by_domain) for reason in reasons})
    if holds or NO_SIGNAL in state.watched.alarms:
        what = (
            f"no signal: the last {counts.total} groups have nothing to teach ({_counts(counts)}); change the "
            "problems, or check the reward with `pipelinerl check`"
        )
        alarm = Alarm("no_signal", what) if holds else None
        effects += settle_alarm(state.watched, NO_SIGNAL, alarm, step=state.version, now=now, raise_after=1)
    evaluates = state.evaluations.current is not None or state.evaluations.due is not None
    dropped = _steps_without_signal(state, only_refused=settings.no_signal is NoSignal.TRAIN)
    if dropped < settings.run.no_signal_steps or evaluates:
        return effects
    state.failing.hopeless = counts.right < _SOLVED * counts.total
    state.stop_reason = _why_without_signal(counts, hopeless=state.failing.hopeless)
    if not state.trainer.stop_sent:
        state.trainer.stop_sent = True
        effects.append(Send(directive(state, settings, answers=f"stop-e{state.epoch}")))
    return effects


def _steps_without_signal(state: RunState, *, only_refused: bool) -> float:
    """Return how many steps' worth of groups had no signal: computed for each domain, then the minimum of all domains.

    0 if any domain has only a few such groups. `only_refused` counts only groups that `curation.filter` refused.
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


def _counts(counts: NoSignalGroups) -> str:
    words = {
        "all right": counts.right,
        "all wrong": counts.wrong,
        "otherwise without signal": counts.other,
        "refused by curation.filter": counts.refused,
    }
    return ", ".join(f"{number} {what}" for what, number in words.items() if number)


def _why_without_signal(counts: NoSignalGroups, *, hopeless: bool) -> str:
    if not hopeless:
        return (
            f"solved: the last {counts.total} groups have nothing left to teach ({_counts(counts)}); use harder "
            "problems to continue, or check the reward with `pipelinerl check` if this is too early"
        )
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
