"""Users' functions as filters of rollout groups: arguments, results and failures; if it fails, the group is dropped."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipelinerl.errors import RecipeError
from pipelinerl.types import Outcome
from pipelinerl.verifiers.group_filter import GroupFilter, refusal_of
from pipelinerl.verifiers.verifier import SampledAnswer, correct, failed, wrong
from tests.fakes.problems import problem
from tests.patience import PATIENCE_S

FILTERS = Path(__file__).with_name("filters.py")
PROBLEM = problem("right", tags=("t=1",), level=3)
ANSWERS = [SampledAnswer("right", (5, 6)), SampledAnswer("no", (7, 8, 9), "length"), SampledAnswer("?", (4,))]
VERDICTS = [correct("right"), wrong("no"), failed("no idea")]


async def verdict_of(function, *, deadline_s=PATIENCE_S, **metadata):
    judge = GroupFilter(f"{FILTERS}:{function}", deadline_s=deadline_s, workers=1)
    try:
        given = replace(PROBLEM, metadata=metadata or PROBLEM.metadata)
        return (await judge.judge(given, ANSWERS, VERDICTS)).verdict
    finally:
        await judge.close()


@pytest.mark.parametrize("function", ["asks_for_all", "everything"])
async def test_group_filter_gets_each_argument_by_the_name_of_its_parameter(function):
    verdict = await verdict_of(function)
    assert (verdict.outcome, refusal_of(verdict)) == (Outcome.CORRECT, ""), verdict.reason


async def test_text_returned_by_a_group_filter_is_the_rejection_reason_and_false_gives_the_filters_name():
    assert refusal_of(await verdict_of("lengths_alone")) == "one of 3 tokens"
    assert refusal_of(await verdict_of("whatever", do="false")) == "whatever"
    assert refusal_of(await verdict_of("whatever", do="numpy")) == ""
    assert len(refusal_of(await verdict_of("whatever", do="long"))) <= 120


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("raise", r"filters\.py:\d+: KeyError: 'nothing'$"),
        ("none", "must return True, False or a reason, it returned None"),
        ("empty", "it returned str ''"),
        ("number", "it returned 1$"),
        ("die", "ended with status 1 before"),
    ],
)
async def test_group_is_dropped_if_its_filter_fails_or_returns_an_invalid_value(what, sentence):
    verdict = await verdict_of("whatever", do=what)
    assert verdict.outcome is Outcome.VERIFIER_ERROR
    assert re.search(sentence, verdict.reason), verdict.reason
    assert refusal_of(verdict) == "curation.filter failed: verifier_error"


async def test_group_filter_that_hangs_is_killed_at_its_deadline():
    verdict = await verdict_of("whatever", do="hang", deadline_s=0.2)
    assert verdict.outcome is Outcome.TIMEOUT and refusal_of(verdict) == "curation.filter failed: timeout"


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("asks_too_much", "a filter may take only the parameters problem, .*; got weather"),
        ("asynchronous", "must be a plain function"),
        ("nothing", "has no 'nothing'; it has "),
    ],
)
def test_function_that_cannot_be_a_group_filter_is_rejected_when_it_is_loaded(function, sentence):
    with pytest.raises(RecipeError, match=rf"^curation\.filter: .*{sentence}"):
        GroupFilter(f"{FILTERS}:{function}", deadline_s=1.0)
