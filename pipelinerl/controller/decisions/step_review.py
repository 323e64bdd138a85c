"""Review of a step: completes its figures by domain with what only the controller knows, and updates the alarms.

Two kinds of figures are added to the trainer's figures of a domain: the groups that actors gave up as stale, and the
work of the domain's verifier since the previous step. The latter are `verified` answers, `verifier_s` per answer, and
`verifier_errors`, which include timeouts. Episodes add `episodes` and `environment_s`, the seconds of each outside the
model; those with tools also `calls_parsed`, `calls_malformed` and `tool_errors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from pipelinerl.controller.decisions.alarms import AlarmKind, alarms_of
from pipelinerl.controller.state.effects import Effect, Record
from pipelinerl.controller.state.run_state import RunState
from pipelinerl.controller.state.watched_steps import FIRST_STEPS, WINDOW, DomainCounts, WatchedStep
from pipelinerl.messages import ActorAlive, GroupOutdated, StepDone, VerifierFigures

#: The most groups per step whose stage timings are included in the step's event.
MOST_STAGES: Final = 4

Figures = Mapping[str, Mapping[str, float]]


def step_taken(state: RunState, report: StepDone) -> list[Effect]:
    """Return the step's event, and the events of alarms that it raises or clears."""
    version, watched = report.model_version, state.watched
    watched.by_domain = _by_domain(state, report.by_domain)
    watched.by_tag = report.by_tag
    by = {"by_domain": watched.by_domain, "by_tag": watched.by_tag}
    several = {"updates": report.updates} if report.updates else {}
    step = {"step": version, "model_version": version, "orders": report.orders}
    stages, watched.stages = msgspec.to_builtins(watched.stages), []
    _remember(state, report)
    return [Record("step", step | report.stats | several | by | {"stages": stages}), *_alarms(state, step=version)]


def note_stages(state: RunState, report: ActorAlive) -> None:
    """Keep the stage timings of the first `MOST_STAGES` groups that actors report, for the step's event."""
    free = MOST_STAGES - len(state.watched.stages)
    if free > 0 and report.stages:
        state.watched.stages = [*state.watched.stages, *report.stages[:free]]


def note_outdated(state: RunState, report: GroupOutdated) -> None:
    """Count a group that an actor gave up as stale, for the next step's figures."""
    if report.domain in state.knobs.domain_weights:
        state.watched.outdated[report.domain] = state.watched.outdated.get(report.domain, 0) + 1


def _alarms(state: RunState, *, step: int) -> list[Effect]:
    watched = state.watched
    standing = alarms_of(watched.recent, first_entropies=watched.first_entropies, raised=watched.alarms)
    of_their_own = {key: what for key, what in watched.alarms.items() if key == f"{AlarmKind.NO_SIGNAL}:"}
    keys = {*(alarm.key for alarm in standing), *of_their_own}
    effects: list[Effect] = [
        Record("alarm", {"alarm": alarm.kind, "domain": alarm.domain, "step": step, "what": alarm.what})
        for alarm in standing
        if alarm.key not in watched.alarms
    ]
    for key in watched.alarms.keys() - keys:
        kind, _, domain = key.partition(":")
        effects.append(Record("alarm_cleared", {"alarm": kind, "domain": domain, "step": step}))
    watched.alarms = {alarm.key: alarm.what for alarm in standing} | of_their_own
    return effects


def _by_domain(state: RunState, reported: Figures) -> dict[str, dict[str, float]]:
    watched = state.watched
    before, watched.verified = watched.verified, _verified(state)
    outdated, watched.outdated = watched.outdated, {}
    figures = {domain: dict(reported.get(domain, {})) for domain in sorted({*reported, *outdated})}
    for domain, each in state.cooldown.take_figures().items():
        figures.setdefault(domain, {}).update(each)
    for domain, each in figures.items():
        each["stale_groups"] = each.get("stale_groups", 0) + outdated.get(domain, 0)
        each["stale"] = each["stale_groups"] / max(1, each["stale_groups"] + each.get("groups", 0))
        if domain in watched.verified:
            each |= _since(watched.verified[domain], before.get(domain, VerifierFigures()))
    return figures


def _verified(state: RunState) -> dict[str, VerifierFigures]:
    """Return the verifier figures by domain, summed over all actors."""
    sums: dict[str, VerifierFigures] = {}
    for alive, _ in state.actors.values():
        for domain, each in alive.verifiers.items():
            so_far = sums.get(domain, VerifierFigures())
            sums[domain] = VerifierFigures(
                judged=so_far.judged + each.judged,
                errors=so_far.errors + each.errors,
                timeouts=so_far.timeouts + each.timeouts,
                seconds=so_far.seconds + each.seconds,
                tool_episodes=so_far.tool_episodes + each.tool_episodes,
                calls_parsed=so_far.calls_parsed + each.calls_parsed,
                calls_malformed=so_far.calls_malformed + each.calls_malformed,
                episodes=so_far.episodes + each.episodes,
                environment_s=so_far.environment_s + each.environment_s,
                tool_errors=so_far.tool_errors + each.tool_errors,
            )
    return sums


def _since(now: VerifierFigures, before: VerifierFigures) -> dict[str, float]:
    """Return the increase from `before` to `now`; if a restarted actor has reset its counters, return `now` itself."""
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
        )
        for domain, figures in watched.by_domain.items()
    }
    step = WatchedStep(
        step=report.model_version,
        entropy=stats.get("entropy"),
        right=stats.get("accuracy"),
        length=stats.get("length_mean"),
        domains=domains,
    )
    watched.recent = [*watched.recent, step][-WINDOW:]
    if step.entropy is not None and len(watched.first_entropies) < FIRST_STEPS:
        watched.first_entropies = [*watched.first_entropies, step.entropy]
