"""Accuracy and its interval, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from pipelinerl.controller.evaluation import Evaluation, wilson_interval
from pipelinerl.messages import EvaluationDone


def answer(index: int, *, correct: bool, judged: bool = True, versions: tuple[int, int] = (5, 5)) -> EvaluationDone:
    return EvaluationDone(
        order_id=f"eval-5-{index:06d}",
        index=index,
        correct=correct,
        judged=judged,
        oldest_version=versions[0],
        newest_version=versions[1],
        num_tokens=1,
    )


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # z² = 3.841459; e.g. 5 of 10: centre (0.5 + z²/20) / (1 + z²/10) = 0.5, half 0.263 (Newcombe 1998's method 3)
        (5, 10, 0.236593, 0.763407),
        (0, 10, 0.0, 0.277533),
        (10, 10, 0.722467, 1.0),
        (1, 1, 0.206549, 1.0),
        (81, 263, 0.2553, 0.3662),  # Newcombe 1998, table I
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_only_what_was_judged_counts() -> None:
    evaluation = Evaluation(5, 5, 0.0)
    for index, kwargs in enumerate([{"correct": True}, {"correct": False}, {"correct": False, "judged": False}]):
        evaluation.add(index, answer(index, **kwargs), now=1.0)  # type: ignore[arg-type]
    evaluation.add(3, None, now=2.0)
    assert not evaluation.complete
    evaluation.add(4, answer(4, correct=True, versions=(4, 7)), now=3.0)
    assert evaluation.complete and evaluation.heard_at == 3.0
    result = evaluation.result()
    assert (result.accuracy, result.problems, result.unjudged) == (2 / 3, 5, 2)
    assert (result.version_min, result.version_max) == (4, 7)
    assert (result.low, result.high) == wilson_interval(2, 3)


def test_the_first_answer_stands() -> None:
    evaluation = Evaluation(5, 2, 0.0)
    evaluation.add(0, answer(0, correct=True), now=1.0)
    evaluation.add(0, answer(0, correct=False), now=2.0)
    evaluation.add(0, None, now=3.0)
    assert evaluation.result().accuracy == 1.0 and not evaluation.complete


def test_an_evaluation_without_answers_knows_nothing() -> None:
    result = Evaluation(5, 3, 0.0).result()
    assert (result.accuracy, result.low, result.high, result.unjudged) == (0.0, 0.0, 1.0, 3)
    assert (result.version_min, result.version_max) == (5, 5)
