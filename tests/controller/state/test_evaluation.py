"""Tests of which evaluation answers are accepted, and of the resulting metrics, against manual computation."""

import pytest

from pipelinerl.config.evaluation import EvaluationSet
from pipelinerl.controller.state.answer_figures import wilson_interval
from pipelinerl.controller.state.evaluation import Evaluation, EvaluationPlan, samples_of
from pipelinerl.enums import Pin
from pipelinerl.messages import ShownAnswer, ShownProblem
from pipelinerl.observability.samples import SampleLog, read_samples
from tests.controller.world import answered


def answer(index, *, correct=0, versions=(5, 5), epoch=1, **fields):
    order_id = f"eval-5-1-{index:06d}"
    return answered(order_id, index, correct=correct, versions=versions, epoch=epoch, **fields)


def evaluation(problems, pin=Pin.NONE, **plan):
    given = {key: plan.pop(key) for key in ("samples", "temperature", "pass_at") if key in plan}
    one_set = EvaluationSet(problems=problems, max_tokens=8, **given)
    return Evaluation(model_version=5, number=1, epoch=1, pin=pin, plan=EvaluationPlan(sets=(one_set,), **plan))


def result_of(evaluation, **at):
    (result,) = evaluation.results(**at)
    return result


def test_evaluation_accuracy_covers_only_problems_with_a_verdict():
    ongoing = evaluation(5, attempts=1)
    for index, given in enumerate([answer(0, correct=1), answer(1), answer(2, judged=0), None]):
        assert not ongoing.add(index, given, now=1.0 + index)
    ongoing.add(0, answer(0), now=2.0)  # later answers to an answered problem are ignored
    ongoing.add(0, None, now=2.0)
    assert not ongoing.complete
    ongoing.add(4, answer(4, correct=1, versions=(4, 7)), now=3.0)
    assert ongoing.complete and ongoing.last_report_at == 3.0
    result = result_of(ongoing)
    assert (result.accuracy, result.problems, result.unjudged) == (2 / 3, 5, 2)
    assert (result.version_min, result.version_max, result.one_version) == (4, 7, False)
    assert (result.low, result.high) == wilson_interval(2, 3)
    assert result.incomplete == "1 of 5 problems had no answer"
    assert result.at_least == pytest.approx(2 / 4), "who could not be judged says nothing, who failed is wrong"


def test_evaluation_problem_that_fails_is_retried_up_to_the_limit():
    ongoing = evaluation(2, attempts=3)
    assert ongoing.add(0, None, now=1.0) and ongoing.add(0, None, now=2.0)
    assert not ongoing.add(0, answer(0, correct=1), now=3.0)
    assert [ongoing.add(1, None, now=4.0) for _ in range(3)] == [True, True, False]
    assert ongoing.complete
    assert (result_of(ongoing).accuracy, result_of(ongoing).incomplete) == (1.0, "1 of 2 problems had no answer")


def test_evaluation_without_answers_has_no_metrics():
    ongoing = evaluation(3, pass_at=(1,))
    ongoing.given_up = "no answer came"
    result = result_of(ongoing)
    assert (result.accuracy, result.low, result.high, result.pass_at, result.unjudged) == (None, None, None, [], 3)
    assert (result.version_min, result.version_max, result.incomplete) == (5, 5, "no answer came")


@pytest.mark.parametrize("other", [{"versions": (4, 5)}, {"versions": (5, 6)}, {"versions": (6, 6)}, {"epoch": 2}])
def test_answer_not_sampled_by_the_pinned_weights_is_retried_up_to_the_limit(other):
    ongoing = evaluation(2, Pin.ENGINE, attempts=3)
    assert ongoing.add(0, answer(0, correct=1, **other), now=1.0)
    assert ongoing.add(0, answer(0, correct=1, **other), now=2.0)
    assert not ongoing.add(0, answer(0, correct=1, **other), now=3.0), "three times are enough"
    assert ongoing.add(1, answer(1, correct=1, **other), now=4.0)
    assert not ongoing.add(1, answer(1, correct=1), now=5.0)
    result = result_of(ongoing, version=9)
    assert (result.accuracy, result.unjudged, result.discarded, result.one_version) == (1.0, 1, 4, True)
    assert result.incomplete == "1 of 2 problems had no answer"
    assert (result.version_min, result.version_max, result.steps_meanwhile) == (5, 5, 4)


def test_number_of_evaluation_problems_in_flight_stays_within_the_given_limit():
    ongoing = evaluation(5)
    assert ongoing.next_questions(2) == [0, 1]
    assert ongoing.next_questions(2) == []
    ongoing.add(1, answer(1), now=1.0)
    assert ongoing.next_questions(2) == [2]
    assert ongoing.next_questions(0) == []
    ongoing.add(0, answer(0), now=1.0)
    assert ongoing.next_questions(9) == [3, 4]
    assert ongoing.next_questions(9) == []


def test_pass_at_k_covers_only_problems_with_at_least_k_samples():
    ongoing = evaluation(4, samples=4, temperature=1.0, pass_at=(1, 2, 4), attempts=1)
    ongoing.add(0, answer(0, correct=1, judged=4), now=1.0)
    ongoing.add(1, answer(1, correct=0, judged=4), now=1.0)
    ongoing.add(2, answer(2, correct=1, judged=2), now=1.0)  # two samples of problem 2 could not be judged
    ongoing.add(3, None, now=1.0)
    result = result_of(ongoing, seed=3)
    assert result.accuracy == pytest.approx((1 / 4 + 0 + 1 / 2) / 3)
    assert [(each.k, each.problems) for each in result.pass_at] == [(1, 3), (2, 3), (4, 2)]
    # k = 2. Of 4 samples with one correct: 1 − C(3, 2)/C(4, 2) = 1 − 3/6. Of 2 samples with one correct: always.
    assert [each.value for each in result.pass_at] == pytest.approx([0.25, (0.5 + 0 + 1) / 3, 0.5])
    assert all(0.0 <= each.low <= each.value <= each.high <= 1.0 for each in result.pass_at)
    assert result_of(ongoing, seed=3) == result


def of_two_sets(**plan):
    """Return an evaluation of two sets of two problems, with one and with four samples each."""
    sets = (
        EvaluationSet(name="easy", problems=2, max_tokens=8),
        EvaluationSet(name="hard", place=1, problems=2, max_tokens=8, samples=4, temperature=1.0, pass_at=(4,)),
    )
    return Evaluation(model_version=5, number=1, epoch=1, pin=Pin.ENGINE, plan=EvaluationPlan(sets=sets, **plan))


def test_evaluation_sets_that_are_evaluated_together_have_separate_metrics():
    ongoing = of_two_sets(attempts=2)
    assert (ongoing.plan.problems, ongoing.next_questions(9)) == (4, [0, 1, 2, 3])
    ongoing.add(0, answer(0, correct=1), now=1.0)
    assert ongoing.add(1, answer(1, versions=(4, 5)), now=1.0), "the problem is retried"
    ongoing.add(1, answer(1), now=1.0)
    ongoing.add(2, answer(2, correct=1, judged=4), now=1.0)
    assert ongoing.add(3, None, now=1.0) and not ongoing.complete
    ongoing.add(3, None, now=1.0)
    easy, hard = ongoing.results(version=7)
    assert ongoing.complete
    assert [(each.name, each.place, each.problems, each.samples) for each in (easy, hard)] == [
        ("easy", 0, 2, 1),
        ("hard", 1, 2, 4),
    ]
    assert (easy.accuracy, easy.discarded, easy.incomplete) == (0.5, 1, "")
    assert (hard.accuracy, hard.discarded, hard.incomplete) == (0.25, 0, "1 of 2 problems had no answer")
    assert [each.k for each in hard.pass_at] == [4] and easy.pass_at == []
    assert {easy.steps_meanwhile, hard.steps_meanwhile} == {2}


def test_evaluation_set_with_all_answers_is_complete_even_if_another_evaluation_set_is_not():
    ongoing = of_two_sets()
    ongoing.add(2, answer(2, correct=4, judged=4), now=1.0)
    ongoing.add(3, answer(3, correct=4, judged=4), now=1.0)
    ongoing.given_up = "no answer came"
    easy, hard = ongoing.results()
    assert (easy.accuracy, easy.incomplete) == (None, "no answer came")
    assert (hard.accuracy, hard.at_least, hard.incomplete) == (1.0, 1.0, "")


def shown(number, index):
    answers = [ShownAnswer("said", "wrong", 0.0, "", "stop", 3, [(8, 3)])]
    text = ShownProblem(problem_id=f"p{index}", prompt="q", ground_truth="a", answers=answers)
    return answered(f"eval-8-{number}-{index:06d}", index, correct=0, versions=(8, 8), domain="d", shown=text)


def test_sample_names_the_evaluation_set_of_its_problem(tmp_path):
    sets = (
        EvaluationSet(name="math", problems=2, max_tokens=8),
        EvaluationSet(name="aime", place=1, problems=1, max_tokens=8),
    )
    current = Evaluation(model_version=8, number=2, plan=EvaluationPlan(sets=sets))
    samples = SampleLog(tmp_path / "samples", "evaluation", max_bytes=2**20)
    for index in range(3):
        samples.put(samples_of(shown(2, index), current=current, time=0.0))
    # This answer belongs to an abandoned evaluation, which had more problems.
    samples.put(samples_of(shown(1, 7), current=current, time=0.0))
    samples.put(samples_of(shown(2, 9), current=None, time=0.0))
    samples.close()
    kept = {group.problem_id: (group.evaluation, group.step) for group in read_samples(tmp_path)}
    assert kept == {"p0": ("math", 8), "p1": ("math", 8), "p2": ("aime", 8), "p7": ("", 8), "p9": ("", 8)}
