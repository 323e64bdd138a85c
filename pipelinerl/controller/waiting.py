"""What a run waits for, and who would unblock it: in words, for people, and for the watchdog's event.

    stage         waits for                                unblocked by
    starting      engines, then the trainer's report       engine processes, the trainer
    publishing    an engine that serves this epoch         the trainer
    evaluating    answers (before the first step)          actors, and the engines behind them
    stepping      groups, or the step on them              actors and engines, or the trainer
    finishing     the trainer's last word, the last evaluation

The watchdog (`Controller.tick`) compares `progress_mark` with the one before: while nothing in it moves, no stage does.
"""

from __future__ import annotations

from typing import Any, Final

from pipelinerl.controller.fleet import Standing
from pipelinerl.controller.state import Phase, RunState

#: A trainer that waits says so every few seconds; an actor's heart beats more often still.
_SILENT_S: Final = 15.0


def progress_mark(state: RunState) -> tuple[Any, ...]:
    """Changes whenever the run gets on, in whatever stage it is."""
    answered = len(state.evaluation.answers) if state.evaluation is not None else -1
    account = state.account
    return (str(state.phase), state.epoch, state.version, account.ended, account.cursor, answered, len(state.results))


def waiting_for(state: RunState, *, now: float) -> str:
    """In words: what the run waits for, and whom."""
    if state.phase is Phase.FINISHED:
        return "nothing: the run is over"
    if not state.fleet.members():
        return f"an engine to join{_lost_engines(state)}"
    if state.phase is Phase.STARTING:
        return "the trainer to be ready"
    if not state.fleet.serving():
        engines = ", ".join(state.fleet.members())
        return f"the trainer to publish its weights to {engines}{_trainer(state, now)}"
    if state.phase is Phase.FINISHING and state.evaluation is not None:
        return f"{_unanswered(state)} answers of the last evaluation{_actors(state, now)}"
    if state.evaluation is not None and state.version == 0:
        return f"{_unanswered(state)} answers of the first evaluation{_actors(state, now)}"
    if not state.actors:
        return "an actor to report"
    step = f"step {state.version + 1}: {state.account.in_flight} groups in flight"
    return step + (_actors(state, now) or _trainer(state, now))


def _unanswered(state: RunState) -> int:
    assert state.evaluation is not None
    return state.evaluation.problems - len(state.evaluation.answers)


def _actors(state: RunState, now: float) -> str:
    late = {name: now - heard for name, (_, heard) in state.actors.items() if now - heard > _SILENT_S}
    if not state.actors:
        return "; no actor has reported"
    return "".join(f"; actor {name} last heard {silent:.0f} s ago" for name, silent in sorted(late.items()))


def _trainer(state: RunState, now: float) -> str:
    if state.trainer_heard is None:
        return ""
    report, heard = state.trainer_heard
    return f"; the trainer's last word, {report}, came {now - heard:.0f} s ago" if now - heard > _SILENT_S else ""


def _lost_engines(state: RunState) -> str:
    dead = [record for record in state.fleet.records() if record.standing in (Standing.DEAD, Standing.EXPELLED)]
    return "".join(f"; {record.url} is {record.standing}: {record.last_error}" for record in dead)
