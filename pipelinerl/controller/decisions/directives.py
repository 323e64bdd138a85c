"""The directive that the trainer is given: a function of the run's state."""

from __future__ import annotations

import math
from enum import StrEnum

from pipelinerl.choices import Overdue
from pipelinerl.controller.state.run_state import RunPhase, RunState
from pipelinerl.controller.state.settings import ControllerSettings
from pipelinerl.messages import Directive, TrainerKnobs


class Recipients(StrEnum):
    """Which engines the trainer is to give its weights to."""

    NOBODY = "nobody"
    JOINING = "joining"
    """Those that are alive and have none of this epoch; what others serve is no concern of theirs."""
    EVERYBODY = "everybody"


def ending(state: RunState, settings: ControllerSettings) -> str | None:
    """Why the run ends at the next step boundary; None while it goes on."""
    if state.stop_reason is None and state.phase is not RunPhase.STARTING and state.version >= settings.steps:
        return f"all {settings.steps} steps are done"
    return state.stop_reason


def directive(
    state: RunState, settings: ControllerSettings, *, answers: str, publish: Recipients, leave: bool = False
) -> Directive:
    """The answer to the report `answers`, or what is said unasked under that name.

    A trainer that is to `leave`, or whose run is given up or suspended, saves its state and publishes nothing more.
    """
    ends = ending(state, settings) is not None
    stop, last = ends or leave, ends and not (leave or state.failing.reason)
    recipients: list[str] = []
    if publish is Recipients.EVERYBODY or last:  # the last weights are for all
        recipients = sorted([*state.fleet.members(), *(state.fleet.pinned() if last else [])])
    elif publish is Recipients.JOINING:
        recipients = state.fleet.without_weights()
    stepped = answers.startswith(f"e{state.epoch}-step-")
    checkpoint = stop or (stepped and state.version % settings.checkpoint_interval_steps == 0)
    return Directive(
        answers=answers,
        epoch=state.epoch,
        knobs=TrainerKnobs(
            k=state.knobs.k,
            learning_rate=state.knobs.learning_rate,
            rollouts_per_step=state.knobs.rollouts_per_step,
        ),
        publish_to=recipients,
        to_verify=[url for url in state.fleet.to_verify() if url in recipients],
        membership=state.fleet.membership,
        failed=state.account.unsettled,
        stale=state.account.unsettled_stale,
        checkpoint=checkpoint,
        stop=stop,
        controller_state=state.checkpoint_record() if checkpoint else None,
        fresh_until=_fresh_until(state, settings),
        issued=state.account.cursor if settings.overdue is Overdue.WAIT else 0,
    )


def _fresh_until(state: RunState, settings: ControllerSettings) -> list[tuple[int, int]]:
    """The last step that orders can surely train, from each first one on; nothing where no step waits for them."""
    if settings.overdue is Overdue.DROP or math.isinf(state.knobs.k):
        return []
    return [(first, loaded + int(state.knobs.k)) for first, loaded in state.loaded_from]
