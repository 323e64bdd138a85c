"""Conversion of reported evaluation answers to the samples that users read."""

from __future__ import annotations

import time
from typing import Final

from pipelinerl.controller.state.evaluation import Evaluation
from pipelinerl.messages import EvaluationDone, ShownAnswer
from pipelinerl.observability.logs import without_secrets
from pipelinerl.observability.samples.record import AnswerRecord, SampleGroup, SampleKind
from pipelinerl.observability.samples.sample_log import SampleLog
from pipelinerl.types import Outcome

_JUDGED: Final = frozenset(outcome.value for outcome in Outcome if outcome.is_judgement)


def keep(samples: SampleLog, report: EvaluationDone, *, current: Evaluation | None) -> None:
    """Store the answers of a report as samples, under the evaluated model version as their step."""
    version = report.newest_version if current is None else current.model_version
    asked = current is not None and current.concerns(report.order_id)
    name = current.plan.question(report.index)[0].name if asked and current is not None else ""
    now = time.time()
    samples.put(lambda: [_sample(report, version, name, now)] if report.shown is not None else [])


def _sample(report: EvaluationDone, version: int, name: str, now: float) -> SampleGroup:
    assert report.shown is not None, "a report without answers has no sample"
    return SampleGroup(
        kind=SampleKind.EVALUATION,
        step=version,
        time=now,
        group_id=report.order_id,
        domain=report.domain,
        evaluation=name,
        problem_id=report.shown.problem_id,
        tags=tuple(report.tags),
        prompt=report.shown.prompt,
        ground_truth=report.shown.ground_truth,
        answers=tuple(_answer(answer, version) for answer in report.shown.answers),
    )


def _answer(answer: ShownAnswer, version: int) -> AnswerRecord:
    judged = answer.outcome in _JUDGED
    return AnswerRecord(
        text=answer.text,
        outcome=answer.outcome,
        reward=answer.reward if judged else None,
        reason=without_secrets(answer.reason),
        length=answer.num_tokens,
        finish_reason=answer.finish_reason,
        spans=tuple(answer.spans),
        staleness=version - min((oldest for oldest, _ in answer.spans), default=version),
    )
