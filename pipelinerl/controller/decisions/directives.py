"""Directives (instructions to the trainer), and the rule for when to publish weights: functions of the run's state."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from pipelinerl.controller.decisions.evaluator import holds_updates
from pipelinerl.controller.state.run_state import ControllerSettings, RunPhase, RunState
from pipelinerl.enums import OnCollapse, Overdue, Pin
from pipelinerl.messages import Directive, TrainerKnobs


def ending(state: RunState, settings: ControllerSettings) -> str | None:
    """Return why the run ends at the next step boundary; None while it continues."""
    if state.stop_reason is None and state.phase is not RunPhase.STARTING and state.version >= settings.run.steps:
        return f"all {settings.run.steps} steps are done"
    return state.stop_reason


def publication_due(state: RunState, settings: ControllerSettings, *, again: bool = False) -> list[str]:
    """Return the engines (base URLs) to which the trainer must publish its weights now; empty if no publication is due.

    | a publication is due when                                           | to            |
    |---------------------------------------------------------------------|---------------|
    | an engine is j versions behind (knob j; at most the staleness bound | all engines   |
    | k, so engines reload before their weights are too old for prompts)  |               |
    | an evaluation waits for the current weights                         | all engines   |
    | engines have no weights of this trainer (epoch)                     | those engines |

    Engines that are draining, or suspect while others are healthy, make no publication due. Suspect ones are left out.

    No publication is due while an evaluation postpones updates, or once the run ends. A publication counts as delivered
    as soon as its directive (instruction to the trainer) is sent. If the trainer's report on the publication omits an
    engine, a publication to this engine is due at the next tick (a call with `again`); the delay prevents a tight loop
    with a publisher that skips engines.
    """
    if state.phase is not RunPhase.TRAINING or holds_updates(state) or ending(state, settings) is not None:
        return []
    ordered = [each for each in state.trainer.publications if not (each.reported and again)]
    loaded = {
        record.url: max(
            record.loaded,
            *(
                each.version
                for each in ordered
                if record.url in each.recipients and record.joined_at <= each.membership
            ),
            -1,
        )
        for record in map(state.fleet.by_url.__getitem__, [*state.fleet.to_verify(), *state.fleet.verified()])
    }
    oldest = min((version for version in loaded.values() if version >= 0), default=state.version)
    evaluation_waits = state.evaluations.due is not None and state.evaluations.current is None
    evaluation_waits = evaluation_waits and settings.evaluation.pin is not Pin.NONE
    if state.bounds.reload_due(current=state.version, loaded=oldest):
        return sorted(state.fleet.to_update())
    if evaluation_waits and oldest < state.version:
        return sorted(state.fleet.to_update())
    return [url for url in state.fleet.without_weights() if loaded[url] < 0]


def directive(
    state: RunState,
    settings: ControllerSettings,
    *,
    answers: str,
    publish_to: Sequence[str] = (),
    leave: bool = False,
    saves: bool = False,
) -> Directive:
    """Return the directive (instruction to the trainer) that answers the trainer's report with the id `answers`.

    For a directive that answers no report, `answers` is a name of its own. The trainer publishes its weights to the
    engines `publish_to` (the final weights: to all engines). With `leave`, it saves its state and stops; with
    `saves`, it saves its state.
    """
    # The final weights go to all engines, regardless of `publish_to`. If the trainer must `leave`, or the run fails or
    # is suspended, the trainer saves its state and publishes nothing more.
    ends = ending(state, settings) is not None
    stop, last = ends or leave, ends and not (leave or state.failing.reason)
    recipients = sorted([*state.fleet.to_update(), *state.fleet.pinned()]) if last else list(publish_to)
    stepped = answers.startswith(f"e{state.epoch}-step-")
    checkpoint = stop or saves or (stepped and state.version % settings.checkpoint_interval_steps == 0)
    # Pairs (order, step): groups of orders from this one on are fresh enough to train until this step. There are none
    # if steps do not wait for groups that are still being sampled, or if k is infinite.
    waits = settings.overdue is Overdue.WAIT
    bounded = waits and not math.isinf(state.knobs.k)
    fresh_until = [(first, loaded + int(state.knobs.k)) for first, loaded in state.loaded_from] if bounded else []
    record = state.checkpoint_record() if checkpoint else None
    if record is not None and settings.run.on_collapse is OnCollapse.REWIND and not state.rewind.done:
        record["good_version"] = state.good_version  # it must stay, so that the run can return
    return Directive(
        answers=answers,
        epoch=state.epoch,
        knobs=TrainerKnobs(
            k=state.knobs.k, learning_rate=state.knobs.learning_rate, rollouts_per_step=state.knobs.rollouts_per_step
        ),
        publish_to=recipients,
        to_verify=[url for url in state.fleet.to_verify() if url in recipients],
        membership=state.fleet.membership,
        failed=state.account.unsettled,
        stale=state.account.unsettled_stale,
        checkpoint=checkpoint,
        stop=stop,
        controller_state=record,
        fresh_until=fresh_until,
        issued=state.account.cursor if waits else 0,
        cores=list(turn_cores(state, settings)),
        rewind_to=None if stop else state.rewind.to,
    )


def turn_cores(state: RunState, settings: ControllerSettings) -> tuple[int, ...]:
    """Return the cores of engines and trainer while they take turns; empty while each computes on its own."""
    turns = state.lag.turns
    return settings.cores if state.knobs.j is None and turns.are_taken and turns.have_begun else ()


def repeated(answer: Directive, state: RunState, settings: ControllerSettings) -> Directive:
    """Return `answer`, to be sent again, with current knobs and outcomes: old ones would undo newer directives."""
    current = directive(state, settings, answers=answer.answers)
    return msgspec.structs.replace(
        answer,
        knobs=current.knobs,
        failed=current.failed,
        stale=current.stale,
        fresh_until=current.fresh_until,
        issued=current.issued,
        cores=current.cores,
    )
