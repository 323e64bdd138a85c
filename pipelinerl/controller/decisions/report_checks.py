"""`implausible`: detects reports that no correct process of this run can have sent, given the controller's state.

A faulty trainer or actor, or any other process that can write to the streams, may send anything. An implausible report
would make more prompt orders end than were issued, or answer evaluation questions that were never issued. The types of
reports bound the sizes of numbers, texts and lists (`messages.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from inference_contract.weights import MOST_EPOCH, MOST_EPOCH_STEP, MOST_VERSION, MOST_VERSION_STEP
from pipelinerl.controller.state.run_state import RunState
from pipelinerl.messages import (
    MOST_AHEAD,
    ActorAlive,
    ConsumedReport,
    EvaluationDone,
    GroupFailed,
    Report,
    TrainerReady,
)
from pipelinerl.types import Purpose

_MOST_ACTORS: Final = 4096


def implausible(state: RunState, report: Report) -> str:
    """Return why `report` is implausible, as a clause; empty if it is plausible."""
    return next(_faults(state, report), "")


def _faults(state: RunState, report: Report) -> Iterator[str]:
    epoch = getattr(report, "epoch", 0)
    if not isinstance(report, EvaluationDone) and epoch > state.epoch:
        yield f"it is of epoch {epoch}, which has not begun"
    version = getattr(report, "model_version", 0)
    most = MOST_VERSION if isinstance(report, TrainerReady) else state.version + MOST_VERSION_STEP
    if version >= most:
        yield f"it is of version {version}, but the run is at {state.version}"
    if isinstance(report, TrainerReady):
        most = min(state.epoch + MOST_EPOCH_STEP, MOST_EPOCH - 2)
        if report.claimed > most:
            yield f"it claims epoch {report.claimed}, but the run is in epoch {state.epoch}"
    if isinstance(report, ActorAlive) and report.name not in state.actors and len(state.actors) >= _MOST_ACTORS:
        yield f"it is from a new actor, beyond the limit of {_MOST_ACTORS}"
    consumed: ConsumedReport | None = getattr(report, "consumed", None)
    if consumed is not None:  # the counts of ended orders
        furthest = max(consumed.frontier - 1, *consumed.beyond, -1)
        if furthest >= state.account.cursor + 2 * MOST_AHEAD:
            yield f"it accounts for order {furthest}, which was never issued"
        beyond = set(consumed.beyond)
        if len(beyond) < len(consumed.beyond) or min(beyond, default=consumed.frontier + 1) <= consumed.frontier:
            yield "its account counts orders twice"
        outcomes = consumed.trained + consumed.filtered + consumed.stale + consumed.failed
        if outcomes != (ended := consumed.frontier + len(beyond)):
            yield f"its account does not balance: {outcomes} orders have outcomes, {ended} ended"
    failed = isinstance(report, GroupFailed) and report.purpose == Purpose.EVALUATION.value
    evaluation = state.evaluations.current
    if not (isinstance(report, EvaluationDone) or failed) or evaluation is None:
        return
    assert isinstance(report, EvaluationDone | GroupFailed)
    if not evaluation.concerns(report.order_id):
        return
    if report.index >= evaluation.next_index:
        yield f"it answers question {report.index}, but only {evaluation.next_index} were issued"
        return
    samples = evaluation.plan.question(report.index)[0].samples
    if isinstance(report, EvaluationDone) and not report.correct <= report.judged <= samples:
        yield f"it counts {report.correct} correct and {report.judged} judged answers of {samples}, which is impossible"
