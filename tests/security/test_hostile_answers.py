"""Answers that try to break, stall or deceive a verifier get a verdict in time; a verifier's failure is not a score."""

import pytest

from benchmarks.verifiers import hostile_texts
from pipelinerl.data.problems import Split, open_source
from pipelinerl.messages import EvaluationDone, encode
from pipelinerl.types import Outcome
from pipelinerl.verifiers.verifier import SampledAnswer
from tests.fakes.problems import problem
from tests.fakes.verifiers import opened
from tests.patience import PATIENCE_S

COUNTS = [pytest.param(40, id="40"), pytest.param(1000, id="1000", marks=pytest.mark.slow)]
GROUP = 8
#: Deadline of a verdict in seconds. On a busy machine, which starts and kills processes slowly, less would not suffice.
DEADLINE_S = 1.0
PROBLEM = problem("x+1")


async def judged(given, texts, **keys):
    """Judge the texts as answers to a problem, a group after another; check that each failure is masked and short."""
    verdicts = []
    async with opened(**{"verifier_timeout_s": DEADLINE_S} | keys) as verifier:
        for begin in range(0, len(texts), GROUP):
            group = [SampledAnswer(text) for text in texts[begin : begin + GROUP]]
            verdicts += [judgement.verdict for judgement in await verifier.judge(given, group)]
    for verdict in verdicts:
        assert verdict.outcome.is_judgement or verdict.reward == 0.0
        message = EvaluationDone(
            order_id="", index=0, correct=0, judged=0, oldest_version=0, newest_version=0, num_tokens=0,
            answers=[verdict.answer, verdict.reason],
        )  # fmt: skip
        assert len(encode(message)) < 10_000
    return verdicts


@pytest.mark.parametrize("count", COUNTS)
async def test_math_verifier_judges_hostile_answers_or_reports_that_it_failed(count):
    right = "\\boxed{1+x}"
    first, *verdicts, last = await judged(PROBLEM, [right, *hostile_texts(count), right])
    assert first.outcome is last.outcome is Outcome.CORRECT
    outcomes = {verdict.outcome for verdict in verdicts}
    assert outcomes <= {Outcome.TIMEOUT, Outcome.WRONG, Outcome.VERIFIER_ERROR}
    assert not [verdict.reason for verdict in verdicts if "did not start" in verdict.reason]


@pytest.mark.parametrize("count", COUNTS)
async def test_reasoning_gym_verifier_judges_hostile_answers_as_wrong(count):
    source = open_source("reasoning_gym:spell_backward", domain="d", split=Split.TRAIN, seed=0)
    texts = [f"\x7f{text}" for text in hostile_texts(count)]
    verdicts = await judged(source.problem(0), texts, verifier="reasoning_gym", verifier_timeout_s=PATIENCE_S)
    assert {verdict.outcome for verdict in verdicts} == {Outcome.WRONG}
