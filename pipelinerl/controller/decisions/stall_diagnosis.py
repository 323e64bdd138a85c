"""Descriptions of what a run waits for, and which role can unblock it, for the status and the watchdog's event.

    stage         waits for                                unblocked by
    starting      engines, then the trainer's report       engine processes, the trainer
    publishing    an engine with proven weights            the trainer, then the engine
    evaluating    answers (before the first step, or with  actors, and the engines behind them
                  updates held: at most `hold_s`)
    stepping      groups, or the step on them              actors and engines, or the trainer
    finishing     the trainer's last report, the last evaluation

The watchdog (`Controller.tick`) compares `progress_mark` with its previous value: an unchanged mark means that no stage
makes progress. Orders that end untrained are not progress: a run that filters or refuses every group is busy, but
stalled.
"""

from __future__ import annotations

from typing import Any, Final

from pipelinerl.controller.decisions.evaluator import holds_updates
from pipelinerl.controller.state.run_state import SILENT_S, RunPhase, RunState

#: Explanations of why prompt orders end untrained, by outcome.
_WHY: Final = {
    "filtered": "their rewards do not differ, nothing could be judged, or the recipe's filter refused them",
    "stale": "sampled by weights older than k allows",
    "failed": "their actor gave up; the log says why",
}


def progress_mark(state: RunState) -> tuple[Any, ...]:
    """Return a value that changes whenever the run makes progress, in any stage."""
    answered = len(state.evaluations.current.answers) if state.evaluations.current is not None else -1
    return (str(state.phase), state.epoch, state.version, answered, len(state.evaluations.results))


def waiting_for(state: RunState, *, now: float) -> str:
    """Describe what the run waits for. A delayed checkpoint is included, since training will have to wait for it."""
    return _stage(state, now) + (f"; {state.trainer.unsaved}" if state.trainer.unsaved else "")


def _stage(state: RunState, now: float) -> str:
    if state.phase is RunPhase.FINISHED:
        return "nothing: the run is over"
    evaluation = state.evaluations.current
    if not state.fleet.members() and evaluation is not None and state.fleet.pinned():
        return f"{_unanswered(state)} answers of {evaluation.engine}, which evaluates and is the only engine left"
    if not state.fleet.members():
        return f"an engine to join{lost_engines(state)}"
    if state.trainer.pending_ready is not None:
        return f"{', '.join(state.trainer.awaited)} to join{lost_engines(state)}"
    if state.phase is RunPhase.STARTING:
        return "the trainer to be ready"
    if not state.fleet.verified():
        return f"{_weights(state)}{_trainer(state, now)}"
    if state.phase is RunPhase.FINISHING and evaluation is not None:
        return f"{_unanswered(state)} answers of the last evaluation{_actors(state, now)}"
    if evaluation is not None and state.version == 0:
        return f"{_unanswered(state)} answers of the first evaluation{_actors(state, now)}"
    if evaluation is not None and holds_updates(state):
        version = evaluation.model_version
        return (
            f"{_unanswered(state)} answers of version {version}: updates are postponed until then{_actors(state, now)}"
        )
    if not state.actors:
        return "an actor to report"
    step = f"step {state.version + 1}: {state.account.in_flight} groups in flight"
    return step + _untrained(state) + _outdated(state) + (_actors(state, now) or _trainer(state, now))


def _weights(state: RunState) -> str:
    given = [record.url for record in state.fleet.records() if record.lifecycle.is_alive and record.loaded >= 0]
    if given:
        return f"{', '.join(given)} to prove its weights to the trainer"
    return f"the trainer to publish its weights to {', '.join(state.fleet.members())}"


def _unanswered(state: RunState) -> int:
    assert state.evaluations.current is not None
    return state.evaluations.current.problems - len(state.evaluations.current.answers)


def _actors(state: RunState, now: float) -> str:
    late = {name: now - heard for name, (_, heard) in state.actors.items() if now - heard > SILENT_S}
    if not state.actors:
        return "; no actor has reported"
    return "".join(f"; actor {name} has been silent for {silent:.0f} s" for name, silent in sorted(late.items()))


def _untrained(state: RunState) -> str:
    """Explain why recent groups led to no step; empty until a whole step's worth of groups has ended untrained."""
    ledger, before = state.account.ledger(), state.trainer.stepped
    ended = {fate: ledger[fate] - getattr(before, fate) for fate in _WHY}
    if sum(ended.values()) < state.knobs.groups_per_step:
        return ""
    causes = ", ".join(f"{number} {fate} ({_WHY[fate]})" for fate, number in ended.items() if number)
    return f"; since the last step {sum(ended.values())} groups ended untrained: {causes}"


def _outdated(state: RunState) -> str:
    """Explain why nothing is sampled; empty unless every order issued now would be too old at its step."""
    loaded, k = state.fleet.oldest_loaded(), state.knobs.k
    if (
        state.account.in_flight
        or loaded is None
        or state.knobs.bounds.accepts(producing=state.version + 1, oldest=loaded)
    ):
        return ""
    return (
        f"; engines serve version {loaded}, too old for k = {k:g}: the trainer has to publish version {state.version}"
    )


def _trainer(state: RunState, now: float) -> str:
    if state.trainer.heard is None:
        return ""
    report, heard = state.trainer.heard
    return f"; the trainer's last report, {report}, came {now - heard:.0f} s ago" if now - heard > SILENT_S else ""


def lost_engines(state: RunState) -> str:
    """List the engines that were lost, with their states and errors; each entry begins with a semicolon."""
    dead = [record for record in state.fleet.records() if not record.lifecycle.is_alive]
    return "".join(f"; {record.url} is {record.lifecycle}: {record.last_error}" for record in dead)
