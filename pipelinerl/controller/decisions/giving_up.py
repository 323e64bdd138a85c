"""When a run cannot go on, or is suspended, and how it ends then: with its state saved, and a sentence that says why.

    cause                                                       is known
    every engine refuses for a reason that no retry mends       when the last of them has
    no engine is alive                                          after `engine_timeout_s`
    a domain's verifier, or the filter, always fails            after 20 in a row, or a step's worth that time out
    every engine refuses every prompt for such a reason         after a step's worth of groups, eight at least
    every prompt is too long for the context                    after eight times what may be in flight
    groups without signal are dropped, and all are such         after `run.no_signal_steps` (`no_signal.py`)

Whether a reason lasts is said by who refuses (`inference_contract.errors.Persistence`), never guessed here. A trainer
that trains is told to save what it has, and is waited for; it has `save_s`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from inference_contract.errors import ContextExceeded, Persistence
from pipelinerl.controller.decisions import no_signal
from pipelinerl.controller.decisions.directives import directive, ending
from pipelinerl.controller.decisions.stall_diagnosis import lost_engines
from pipelinerl.controller.state.effects import Effect, End, Finish, Record, Send
from pipelinerl.controller.state.fleet import EngineLifecycle
from pipelinerl.controller.state.run_state import RunPhase, RunState
from pipelinerl.controller.state.settings import ControllerSettings
from pipelinerl.messages import GroupFailed, VerifierFigures

#: Fewer groups may all have a prompt that is too long.
_FEW_GROUPS: Final = 8
#: So many failures of a domain's verifier in a row end the run.
_VERDICTS_THAT_END: Final = 20
#: What of the recipe judges groups.
THE_FILTER: Final = "curation.filter"
#: So many times what is in flight may be too long since the last step: eight of nine prompts.
_TOO_LONG: Final = 8


def give_up(state: RunState, settings: ControllerSettings, *, now: float) -> list[Effect]:
    """What follows after a decision if the run cannot go on; called after each."""
    if state.phase is RunPhase.FINISHED:
        return []
    if state.failing.reason:
        saved = state.phase is not RunPhase.TRAINING or now - state.failing.since > settings.save_s
        return finish(state, settings) if saved else []
    state.failing.engineless_since = 0.0 if _alive(state) else state.failing.engineless_since or now
    reason = next(_reasons(state, settings, now), None)
    if reason is None:
        return no_signal.review(state, settings)
    return [Record("run_failing", {"reason": reason}), *_end(state, settings, reason, now=now)]


def suspend(state: RunState, settings: ControllerSettings, reason: str, *, now: float) -> list[Effect]:
    """End the run as one that cannot go on, but that it can: without a last publication or evaluation."""
    if state.failing.reason or state.phase is RunPhase.FINISHED:
        return []
    state.failing.suspends = True
    return [Record("run_suspending", {"reason": reason}), *_end(state, settings, reason, now=now)]


def finish(state: RunState, settings: ControllerSettings) -> list[Effect]:
    """The run is over."""
    state.phase = RunPhase.FINISHED
    return [last_word(state, settings)]


def last_word(state: RunState, settings: ControllerSettings) -> Finish:
    """How a run that is over has ended."""
    if state.failing.reason:
        return Finish(state.failing.reason, End.SUSPENDED if state.failing.suspends else End.FAILED)
    return Finish(ending(state, settings) or "stopped", End.FAILED if state.failing.hopeless else End.COMPLETED)


def refused(state: RunState, report: GroupFailed) -> None:
    """Note a group that failed, whether that will last, and why."""
    if report.code == ContextExceeded.code:
        state.failing.too_long_groups += 1
        state.failing.too_long_reason = report.reason
        return
    lasts = report.persistence is Persistence.PERMANENT
    state.failing.refused_groups = state.failing.refused_groups + 1 if lasts else 0
    state.failing.refused_reason = report.reason


# --- details ---------------------------------------------------------------------------------------------------------


def _end(state: RunState, settings: ControllerSettings, reason: str, *, now: float) -> list[Effect]:
    """At once, or when the trainer has saved its state."""
    state.failing.reason, state.failing.since = reason, now
    if state.phase is not RunPhase.TRAINING:
        return finish(state, settings)
    state.stop_reason, state.trainer.stop_sent = reason, True
    name = f"{'suspend' if state.failing.suspends else 'fail'}-e{state.epoch}-{state.version}"
    return [Send(directive(state, settings, answers=name))]


def _alive(state: RunState) -> bool:
    return any(record.lifecycle.is_alive for record in state.fleet.by_url.values())


def _reasons(state: RunState, settings: ControllerSettings, now: float) -> Iterator[str]:
    if state.phase is RunPhase.FINISHING:
        return  # what is trained is saved; the last evaluation has bounds of its own
    yield from _all_refuse(state, settings)
    if state.failing.engineless_since and now - state.failing.engineless_since > settings.engine_timeout_s:
        yield (
            f"no engine has been there for {settings.engine_timeout_s:g} s (run.engine_timeout_s)"
            f"{lost_engines(state)}; start one, or see the engines' logs"
        )
    yield from _no_verdicts(state, now)
    refused_groups, reason = state.failing.refused_groups, state.failing.refused_reason
    if refused_groups >= max(state.knobs.groups_per_step, _FEW_GROUPS) and not _some_ended_well(state):
        yield f"engines refuse the prompts of {refused_groups} groups in a row: {reason}"
    yield from _all_too_long(state)


def _all_refuse(state: RunState, settings: ControllerSettings) -> Iterator[str]:
    """No engine can come any more but by an operator's hand: each has come, and is out for good."""
    if any(each.lifecycle is not EngineLifecycle.EXPELLED and not each.to_stop for each in state.fleet.by_url.values()):
        return  # this is asked after each decision, and the first of a thousand engines answers it
    records = [record for record in state.fleet.records() if not record.to_stop]
    names = {record.name for record in records}
    to_come = [request for request in state.engine_requests if request.wanted and request.name not in names]
    if to_come or len(state.fleet.records()) < settings.engines_expected:
        return
    refusals = [record for record in records if record.refuses]
    if refusals and all(record.lifecycle is EngineLifecycle.EXPELLED for record in records):
        said = "; ".join(f"{record.url} {record.last_error}" for record in refusals[:3])
        yield f"no engine can serve this run: {said}"


def _all_too_long(state: RunState) -> Iterator[str]:
    """A prompt that is too long is refused at once, while others are being answered: as many are refused as are issued
    in the place of such until all that is in flight fits. A few in a hundred are no reason, most of them are."""
    failing = state.failing
    if not failing.too_long_groups:
        return
    most = _TOO_LONG * max(state.knobs.groups_per_step, _FEW_GROUPS, state.account.in_flight)
    if failing.too_long_groups >= most and not _some_ended_well(state):
        yield (
            f"{failing.too_long_groups} prompts since the last step were too long, and no group was made: "
            f"{failing.too_long_reason}; raise engine.context_length, or leave such problems out"
        )


def _no_verdicts(state: RunState, now: float) -> Iterator[str]:
    """A domain's verifier, or the filter, has failed on whatever it was given of late, with every actor that asked it.

    Answers that take too long may be the model's doing, and come many at a time: they take a step's worth.
    """
    actors = list(state.live_actors(now))
    judges = {
        f"the verifier of domain {domain}": [alive.verifiers[domain] for alive in actors if domain in alive.verifiers]
        for domain in sorted({domain for alive in actors for domain in alive.verifiers})
    }
    filters = [alive.filtering for alive in actors if alive.filtering != VerifierFigures()]
    for judge, asked in [*judges.items(), (THE_FILTER, filters)]:
        failing = [figures for figures in asked if figures.errors_in_a_row or figures.timeouts_in_a_row]
        errors = sum(figures.errors_in_a_row for figures in failing)
        count = errors + sum(figures.timeouts_in_a_row for figures in failing)
        enough = errors >= _VERDICTS_THAT_END or count >= max(_VERDICTS_THAT_END, state.knobs.rollouts_per_step)
        if failing and len(failing) == len(asked) and enough:
            of = "groups" if judge == THE_FILTER else "answers"
            yield f"{judge} has given {count} {of} in a row no verdict; the last: {failing[-1].reason}"


def _some_ended_well(state: RunState) -> bool:
    """Has any group come to the trainer since the last step, if only to be filtered?"""
    ledger, before = state.account.ledger(), state.trainer.stepped
    return any(ledger[fate] > getattr(before, fate) for fate in ("filtered", "stale"))
