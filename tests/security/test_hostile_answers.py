"""Answers that try to break, stall or deceive a verifier get a verdict in time; a verifier's failure is not a score."""

from contextlib import asynccontextmanager

import pytest

from benchmarks.verifiers import hostile_texts
from pipelinerl.config.recipe import DomainSection
from pipelinerl.data.problems import Split, open_source
from pipelinerl.messages import EvaluationDone, encode
from pipelinerl.roles.verification import open_verifier
from pipelinerl.types import Outcome
from pipelinerl.verifiers.verifier import SampledAnswer
from tests.fakes.problems import problem
from tests.patience import PATIENCE_S

GROUP = 8
COUNTS = [pytest.param(40, id="40"), pytest.param(1000, id="1000", marks=pytest.mark.slow)]
#: Indices (modulo 20) of the `hostile_texts` whose comparison takes much longer than any deadline.
ENDLESS = (6, 8)
#: Deadline of a verdict in seconds. On a busy machine, which starts and kills processes slowly, less would not suffice.
DEADLINE_S = 1.0
PROBLEM = problem("x+1")


@asynccontextmanager
async def judging(**keys):
    section = {"name": "d", "source": "addition", "verifier_timeout_s": DEADLINE_S} | keys
    verifier = open_verifier(DomainSection(**section))
    try:
        yield verifier
    finally:
        await verifier.close()


async def judged(verifier, problem, texts):
    """Judge the texts as answers to the problem, in groups of `GROUP`, one group after another."""
    judgements = []
    for begin in range(0, len(texts), GROUP):
        judgements += await verifier.judge(problem, [SampledAnswer(text) for text in texts[begin : begin + GROUP]])
    return judgements


def assert_no_failure_is_a_zero(judgements):
    """Assert that verifier failures have reward 0, that no verdict is correct, and that each fits into a report."""
    for verdict, _ in judgements:
        assert verdict.outcome.is_judgement or verdict.reward == 0.0
        assert verdict.outcome is not Outcome.CORRECT
        message = EvaluationDone(
            order_id="", index=0, correct=0, judged=0, oldest_version=0, newest_version=0, num_tokens=0,
            answers=[verdict.answer, verdict.reason],
        )  # fmt: skip
        assert len(encode(message)) < 10_000


@pytest.mark.parametrize("count", COUNTS)
async def test_math_verifier_judges_hostile_answers_or_reports_that_it_failed(count):
    texts = hostile_texts(count)
    async with judging() as verifier:
        await verifier.judge(PROBLEM, [SampledAnswer("\\boxed{1+x}")])
        judgements = await judged(verifier, PROBLEM, texts)
        assert (await verifier.judge(PROBLEM, [SampledAnswer("\\boxed{1+x}")]))[0].verdict.outcome is Outcome.CORRECT
    assert_no_failure_is_a_zero(judgements)
    endless = [judgements[number].verdict.outcome for number in range(count) if number % 20 in ENDLESS]
    assert set(endless) <= {
        Outcome.TIMEOUT,
        Outcome.WRONG,
        Outcome.VERIFIER_ERROR,
    }  # the outcome depends on how much processor time the endless expression got
    ours = [j.verdict.reason for j in judgements if j.verdict.outcome is Outcome.VERIFIER_ERROR]
    assert not [reason for reason in ours if "did not start" in reason]


@pytest.mark.parametrize("count", COUNTS)
async def test_reasoning_gym_verifier_judges_hostile_answers_as_wrong(count):
    source = open_source("reasoning_gym:spell_backward", domain="d", split=Split.TRAIN, seed=0)
    async with judging(verifier="reasoning_gym", verifier_timeout_s=PATIENCE_S) as verifier:
        judgements = await judged(verifier, source.problem(0), [f"\x7f{text}" for text in hostile_texts(count)])
    assert_no_failure_is_a_zero(judgements)
    assert {judgement.verdict.outcome for judgement in judgements} == {Outcome.WRONG}
