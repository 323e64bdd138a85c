"""Rules that describe what a stalled run waits for, and that end a run which cannot continue or is suspended.

    cause                                                       detected
    every engine is expelled for good, one for refusing work    when the last engine is expelled
    no engine is alive                                          after `engine_timeout_s`
    a domain's verifier, or `curation.filter`, always fails     after 20 errors in a row, or after as many timeouts in
                                                                a row as a step has rollouts
    every engine permanently refuses every prompt               after as many refused groups in a row as a step has, at
                                                                least 8
    every prompt is too long for the context                    when such prompts outnumber orders in flight 8 : 1
    no group has signal, and such groups are dropped            after `run.no_signal_steps` (`step_review.py`)

A process that refuses work reports whether its reason is permanent (`inference_contract.errors.Persistence`). Before
the run ends, a trainer that is training is directed to save its state, and gets `save_s` seconds to do so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from inference_contract.errors import ContextExceeded, Persistence
from pipelinerl.controller.decisions import step_review
from pipelinerl.controller.decisions.directives import directive, ending
from pipelinerl.controller.decisions.evaluator import holds_updates
from pipelinerl.controller.state.fleet import EngineLifecycle, EngineRecord
from pipelinerl.controller.state.inputs_and_effects import Effect, End, Finish, Record, Send
from pipelinerl.controller.state.run_state import SILENT_S, ControllerSettings, RunPhase, RunState
from pipelinerl.messages import GroupFailed, VerifierFigures

#: The run may end because of failed groups only after this many of them: a few groups may fail by chance.
_FEW_GROUPS: Final = 8
#: Consecutive failures of a domain's verifier after which the run ends.
_VERDICTS_THAT_END: Final = 20
#: Name of the group filter in error messages: the recipe key that sets the filter.
THE_FILTER: Final = "curation.filter"
#: The run ends if, within one step, the number of too long prompts exceeds this multiple of the orders in flight; then
#: about 8 of 9 prompts are too long.
_TOO_LONG: Final = 8


def give_up(state: RunState, settings: ControllerSettings, *, now: float) -> list[Effect]:
    """Return the effects that end the run if it cannot continue, otherwise none; called after each decision."""
    if state.phase is RunPhase.FINISHED:
        return []
    if state.failing.reason:
        saved = state.phase is not RunPhase.TRAINING or now - state.failing.since > settings.save_s
        return [finish(state, settings)] if saved else []
    is_alive = any(record.lifecycle.is_alive for record in state.fleet.by_url.values())
    state.failing.engineless_since = 0.0 if is_alive else state.failing.engineless_since or now
    reason = next(_reasons(state, settings, now), None)
    if reason is None:
        return step_review.review(state, settings, now=now)
    return [Record("run_failing", {"reason": reason}), *_end(state, settings, reason, now=now)]


def suspend(state: RunState, settings: ControllerSettings, reason: str, *, now: float) -> list[Effect]:
    """End a healthy run as soon as the trainer has saved its state, without a last publication or evaluation."""
    if state.failing.reason or state.phase is RunPhase.FINISHED:
        return []
    state.failing.suspends = True
    return [Record("run_suspending", {"reason": reason}), *_end(state, settings, reason, now=now)]


def finish(state: RunState, settings: ControllerSettings) -> Finish:
    """Mark the run as finished; return the reason, and whether it completed, failed or was suspended."""
    state.phase = RunPhase.FINISHED
    if state.failing.reason:
        return Finish(state.failing.reason, End.SUSPENDED if state.failing.suspends else End.FAILED)
    return Finish(ending(state, settings) or "stopped", End.FAILED if state.failing.hopeless else End.COMPLETED)


def refused(state: RunState, report: GroupFailed) -> None:
    """Count a group whose prompt was too long or was refused for good; a transient failure resets the count."""
    if report.code == ContextExceeded.code:
        state.failing.too_long_groups += 1
        state.failing.too_long_reason = report.reason
        return
    lasts = report.persistence is Persistence.PERMANENT
    state.failing.refused_groups = state.failing.refused_groups + 1 if lasts else 0
    state.failing.refused_reason = report.reason


# --- details ---------------------------------------------------------------------------------------------------------


def _end(state: RunState, settings: ControllerSettings, reason: str, *, now: float) -> list[Effect]:
    state.failing.reason, state.failing.since = reason, now
    if state.phase is not RunPhase.TRAINING:
        return [finish(state, settings)]
    state.stop_reason, state.trainer.stop_sent = reason, True
    name = f"{'suspend' if state.failing.suspends else 'fail'}-e{state.epoch}-{state.version}"
    return [Send(directive(state, settings, answers=name))]


def _reasons(state: RunState, settings: ControllerSettings, now: float) -> Iterator[str]:
    if state.phase is RunPhase.FINISHING:
        return  # no reason to give up: the state is saved already, and the last evaluation has time limits of its own
    yield from _all_refuse(state, settings)
    if state.failing.engineless_since and now - state.failing.engineless_since > settings.run.engine_timeout_s:
        yield (
            f"no engine has been alive for {settings.run.engine_timeout_s:g} s (run.engine_timeout_s)"
            f"{_lost_engines(state)}; start one, or see the engines' logs"
        )
    yield from _no_verdicts(state, now)
    refused_groups, reason = state.failing.refused_groups, state.failing.refused_reason
    if refused_groups >= max(state.knobs.groups_per_step, _FEW_GROUPS) and not _some_ended_well(state):
        yield f"engines refuse the prompts of {refused_groups} groups in a row: {reason}"
    # A prompt that is too long fails immediately and is replaced, so even a few percent of such prompts cause many
    # failures. Only a large multiple of the orders in flight means that nearly all prompts are too long.
    too_long = state.failing.too_long_groups
    most = _TOO_LONG * max(state.knobs.groups_per_step, _FEW_GROUPS, state.account.in_flight) if too_long else 1
    if too_long >= most and not _some_ended_well(state):
        yield (
            f"{too_long} prompts since the last step were too long, and no group was made: "
            f"{state.failing.too_long_reason}; raise engine.context_length, or remove such problems"
        )


def _all_refuse(state: RunState, settings: ControllerSettings) -> Iterator[str]:
    """Yield a reason to end the run if every engine is expelled for good, and at least one refuses to serve the run.

    There is no reason while an engine has yet to join or may return. Engines that an operator removed do not count.
    """
    if any(each.lifecycle is not EngineLifecycle.EXPELLED and not each.to_stop for each in state.fleet.by_url.values()):
        return  # for speed, handle the usual case first: this check runs after each decision
    records = [record for record in state.fleet.records() if not record.to_stop]
    names = {record.name for record in records}
    to_come = [request for request in state.engine_requests if request.wanted and request.name not in names]
    if to_come or len(state.fleet.records()) < settings.engines_expected:
        return
    refusals = [record for record in records if record.refuses]
    if refusals and not any(record.may_return for record in records):
        reasons = "; ".join(f"{record.url} {record.last_error}" for record in refusals[:3])
        yield f"no engine can serve this run: {reasons}"


def _no_verdicts(state: RunState, now: float) -> Iterator[str]:
    """Yield a reason to end the run if a domain's verifier or `curation.filter` keeps failing for all its actors."""
    # The run ends after `_VERDICTS_THAT_END` errors in a row. Timeouts may be the fault of the answers and come in
    # bursts, so they end the run only after as many answers as a step has.
    actors = list(state.live_actors(now))
    judges = {}
    for domain in sorted({domain for alive in actors for domain in alive.verifiers}):
        figures_of = [alive.verifiers[domain] for alive in actors if domain in alive.verifiers]
        judge = "environment or verifier" if any(figures.episodes for figures in figures_of) else "verifier"
        judges[f"the {judge} of domain {domain}"] = figures_of
    filters = [alive.filtering for alive in actors if alive.filtering != VerifierFigures()]
    for judge, of_all_actors in [*judges.items(), (THE_FILTER, filters)]:
        failing = [figures for figures in of_all_actors if figures.errors_in_a_row or figures.timeouts_in_a_row]
        errors = sum(figures.errors_in_a_row for figures in failing)
        count = errors + sum(figures.timeouts_in_a_row for figures in failing)
        enough = errors >= _VERDICTS_THAT_END or count >= max(_VERDICTS_THAT_END, state.knobs.rollouts_per_step)
        if failing and len(failing) == len(of_all_actors) and enough:
            of = "groups" if judge == THE_FILTER else "answers"
            yield f"{judge} has failed on {count} {of} in a row; the last error: {failing[-1].reason}"


def _some_ended_well(state: RunState) -> bool:
    """Return True if any group since the last step ended as filtered or as stale, so that not all groups fail."""
    ledger, before = state.account.ledger(), state.trainer.stepped
    return any(ledger[outcome] > getattr(before, outcome) for outcome in ("filtered", "stale"))


#: Explanations of why prompt orders end untrained, by outcome.
_WHY: Final = {
    "filtered": "their rewards do not differ, nothing could be judged, or the recipe's filter refused them",
    "stale": "sampled by weights older than k allows",
    "failed": "their actor gave up; the log says why",
}


def progress_mark(state: RunState) -> tuple[Any, ...]:
    """Return a value that changes whenever the run makes progress, in any of its phases."""
    answered = len(state.evaluations.current.answers) if state.evaluations.current is not None else -1
    return (str(state.phase), state.epoch, state.version, answered, len(state.evaluations.results))


def waiting_for(state: RunState, *, now: float) -> str:
    """Describe what the run waits for, and mention engines that do not serve and a delayed checkpoint."""
    stage = _stage(state, now)
    lost = (EngineLifecycle.SUSPECT, EngineLifecycle.DIRTY, EngineLifecycle.DEAD)
    unnamed = _listed(each for each in state.fleet.records() if each.lifecycle in lost and each.url not in stage)
    return stage + unnamed + (f"; {state.trainer.unsaved}" if state.trainer.unsaved else "")


def _stage(state: RunState, now: float) -> str:
    if state.phase is RunPhase.FINISHED:
        return "nothing: the run is over"
    evaluation, members = state.evaluations.current, state.fleet.members()
    answers = "" if evaluation is None else f"{evaluation.plan.problems - len(evaluation.answers)} answers of"
    if not members and evaluation is not None and state.fleet.pinned():
        return f"{answers} {evaluation.engine}, which evaluates and is the only engine left"
    if not members:
        return f"an engine to join{_lost_engines(state)}"
    if state.trainer.pending_ready is not None:
        return f"{', '.join(state.trainer.awaited)} to join{_lost_engines(state)}"
    if state.phase is RunPhase.STARTING:
        return "the trainer to be ready"
    report, reported_at = state.trainer.last_report or ("", now)
    silent_s = now - reported_at
    trainer = f"; the trainer's last report, {report}, came {silent_s:.0f} s ago" if silent_s > SILENT_S else ""
    if not state.fleet.verified():
        given = [each.url for each in state.fleet.records() if each.lifecycle.is_alive and each.loaded >= 0]
        if given:
            return f"{', '.join(given)} to pass the trainer's canary check{trainer}"
        return f"the trainer to publish its weights to {', '.join(members)}{trainer}"
    actors = "".join(
        f"; actor {name} has been silent for {now - reported_at:.0f} s"
        for name, (_, reported_at) in sorted(state.actors.items())
        if now - reported_at > SILENT_S
    )
    if evaluation is not None:
        none = "" if state.actors else "; no actor has reported"
        if state.phase is RunPhase.FINISHING:
            return f"{answers} the last evaluation{none}{actors}"
        if state.version == 0:
            return f"{answers} the first evaluation{none}{actors}"
        if holds_updates(state):
            version = evaluation.model_version
            return f"{answers} version {version}: updates are postponed until then{none}{actors}"
    if not state.actors:
        return "an actor to report"
    step = f"step {state.version + 1}: {state.account.in_flight} groups in flight"
    ledger, before = state.account.ledger(), state.trainer.stepped
    ended = {outcome: ledger[outcome] - getattr(before, outcome) for outcome in _WHY}
    if sum(ended.values()) >= state.knobs.groups_per_step:
        causes = ", ".join(f"{number} {outcome} ({_WHY[outcome]})" for outcome, number in ended.items() if number)
        step += f"; since the last step {sum(ended.values())} groups ended untrained: {causes}"
    loaded, newest, k = state.fleet.oldest_loaded(), state.version, state.knobs.k
    may_issue = loaded is None or state.bounds.accepts(producing=newest + 1, oldest=loaded)
    if not (state.account.in_flight or may_issue):
        step += f"; engines serve version {loaded}, too old for k = {k:g}: the trainer has to publish version {newest}"
    return step + (actors or trainer)


def _lost_engines(state: RunState) -> str:
    return _listed(record for record in state.fleet.records() if not record.lifecycle.is_alive)


def _listed(dead: Iterable[EngineRecord]) -> str:
    """List engines with their states and errors, as text to append: each entry begins with a semicolon."""
    return "".join(f"; {record.url} is {record.lifecycle}: {record.last_error}" for record in dead)
