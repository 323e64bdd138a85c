"""Tests of problem sources written by users: accepted results, and one-sentence errors for all other results."""

import itertools

import pytest

from pipelinerl.data.problems import open_users
from pipelinerl.data.prompts import Prompts, Template
from pipelinerl.data.source import SourceRequest, Split
from pipelinerl.errors import RecipeError
from pipelinerl.types import Message, Problem


def listed(count=50, tag=""):
    tags = {"tags": [tag]} if tag else {}
    return [{"prompt": f"q{i}", "answer": str(i), "metadata": {"i": i}} | tags for i in range(count)]


def generated(count=50):
    yield from listed(count)


def by_split(split, seed):
    return [{"prompt": f"{split} {i}", "answer": str(seed)} for i in range(4)] + [{"prompt": "both", "answer": "x"}]


class Endless:
    def problem(self, index):
        return Problem(problem_id=str(index), domain="mine", messages=(Message("user", "q"),), ground_truth="a")


def source(function, split=Split.TRAIN, prompts=Prompts(), **parameters):
    return open_users(function, SourceRequest(domain="d", split=split, seed=7, parameters=parameters, prompts=prompts))


def questions(opened):
    return {opened.problem(index).messages[-1].content for index in range(len(opened))}


@pytest.mark.parametrize("function", [listed, generated])
def test_problems_returned_by_a_users_function_are_split_by_hash(function):
    splits = [questions(source(function, split, count=60)) for split in Split]
    assert set().union(*splits) == {f"q{i}" for i in range(60)}
    assert not any(one & other for one, other in itertools.combinations(splits, 2))
    problem = source(listed, tag="easy").problem(0)
    assert problem.tags == ("easy",) and problem.metadata == {"i": int(problem.ground_truth)}


def test_users_function_with_a_split_parameter_is_called_once_per_split():
    splits = {split: questions(source(by_split, split)) for split in Split}
    for split in Split:
        assert {f"{split} {i}" for i in range(4)} <= splits[split]
    assert [split for split in Split if "both" in splits[split]] == [Split.HELD_OUT], (
        "a question of several splits must stay in the held-out split"
    )
    assert source(by_split).problem(0).ground_truth == "7"


def test_problem_source_returned_by_a_users_function_is_used_as_is_with_the_domains_prompts():
    def endless():
        return Endless()

    problem = source(endless, prompts=Prompts(system="s", template=Template("Say {prompt}"))).problem(10**9)
    assert problem.domain == "d" and problem.problem_id == "1000000000"
    assert problem.messages == (Message("system", "s"), Message("user", "Say q"))


def refused(function, **parameters):
    with pytest.raises(RecipeError) as caught:
        source(function, **parameters).problem(0)
    return str(caught.value)


def test_unusable_user_functions_and_results_are_rejected_with_a_reason():
    incomplete = [listed()[0], {"prompt": "a"}]
    assert "parameters do not fit listed: got an unexpected keyword argument 'zzz'" in refused(listed, zzz=1)
    assert "must return problems, as dicts with prompt and answer" in refused(lambda: 5)
    assert 'row 1: field "answer" is missing or null; the row has prompt' in refused(lambda: incomplete)
    assert "row 0: expected a dict with prompt and answer, got 'q'" in refused(lambda: ["q"])
    assert "must name a function, got 5" in refused(5)

    class Wrong:
        def problem(self, index):
            return "q"

    assert "problem(0) must return a Problem with Messages, got 'q'" in refused(Wrong)
    assert 'row 0: field "prompt" is empty' in refused(lambda: [{"prompt": " ", "answer": "a"}])


def test_problem_with_an_empty_question_is_rejected_and_one_with_an_empty_tool_result_accepted():
    class Said:
        messages = (Message("user", "q"), Message("tool", ""))

        def problem(self, index):
            return Problem(problem_id="p7", domain="mine", messages=self.messages, ground_truth="a")

    assert source(Said).problem(0).messages == Said.messages
    for Said.messages in ((), (Message("user", " \n"),), (Message("user", "q"), Message("user", ""))):
        assert "p7 has no question: it has no message, or the last one is empty" in refused(Said)
