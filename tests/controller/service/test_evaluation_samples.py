"""Tests that evaluation answers become samples, with their version and evaluation set."""

from __future__ import annotations

from pathlib import Path

from pipelinerl.controller.service.evaluation_samples import keep
from pipelinerl.controller.state.evaluation import Evaluation, EvaluationPlan, EvaluationSet
from pipelinerl.messages import EvaluationDone, ShownAnswer, ShownProblem
from pipelinerl.observability.samples.reading import read_samples
from pipelinerl.observability.samples.sample_log import SampleLog


def done(number: int, index: int) -> EvaluationDone:
    answers = [ShownAnswer("said", "wrong", 0.0, "", "stop", 3, [(8, 3)])]
    return EvaluationDone(
        order_id=f"eval-8-{number}-{index:06d}",
        index=index,
        correct=0,
        judged=1,
        oldest_version=8,
        newest_version=8,
        num_tokens=3,
        domain="d",
        shown=ShownProblem(problem_id=f"p{index}", prompt="q", ground_truth="a", answers=answers),
    )


def test_sample_names_the_evaluation_set_of_its_problem(tmp_path: Path) -> None:
    sets = (
        EvaluationSet(name="math", problems=2, max_tokens=8),
        EvaluationSet(name="aime", place=1, problems=1, max_tokens=8),
    )
    current = Evaluation(model_version=8, number=2, plan=EvaluationPlan(sets=sets))
    samples = SampleLog(tmp_path / "samples", "evaluation", max_bytes=2**20)
    for index in range(3):
        keep(samples, done(2, index), current=current)
    keep(samples, done(1, 7), current=current)  # an answer to an abandoned evaluation, which had more problems
    keep(samples, done(2, 9), current=None)
    samples.close()
    kept = {group.problem_id: (group.evaluation, group.step) for group in read_samples(tmp_path)}
    assert kept == {"p0": ("math", 8), "p1": ("math", 8), "p2": ("aime", 8), "p7": ("", 8), "p9": ("", 8)}
