"""The verifier `InstructionFollowing` (IFEval instructions): its rewards, their parts, and the verifier's failures."""

import pytest

from pipelinerl.plugins.instructions.catalogue import Matching, Score
from pipelinerl.plugins.instructions.verifier import InstructionFollowing
from pipelinerl.types import Outcome
from tests.fakes.problems import problem
from tests.patience import PATIENCE_S

COMMA, WORDS, KEYWORD = "punctuation:no_comma", "length_constraints:number_words", "keywords:existence"


SEA = problem(instructions=[
    {"id": COMMA}, {"id": WORDS, "num_words": 3, "relation": "at least"},
    {"id": KEYWORD, "keywords": ["sea"]}, {"id": KEYWORD, "keywords": ["blue"]},
])  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "text", "reward", "outcome"),
    [
        ({}, "the sea is blue", 1.0, Outcome.CORRECT),
        ({}, "the sea, it is green", 0.5, Outcome.PARTIAL),
        ({"score": Score.ALL}, "the sea, it is green", 0.0, Outcome.WRONG),
        ({"score": Score.ALL}, "the sea is blue", 1.0, Outcome.CORRECT),
        ({}, "", 0.0, Outcome.WRONG),
        ({}, "Well, so:\nthe sea is blue", 0.75, Outcome.PARTIAL),
        ({"matching": Matching.LOOSE}, "Well, so:\nthe sea is blue", 1.0, Outcome.CORRECT),
    ],
)
async def test_reward_for_following_instructions_depends_on_the_settings_scoring_and_matching(
    settings, text, reward, outcome
):
    verdict = await InstructionFollowing(**settings).verify(SEA, text)
    assert (verdict.reward, verdict.outcome) == (reward, outcome)
    if outcome is not Outcome.CORRECT and text:
        assert COMMA in verdict.reason


async def test_reward_has_a_part_for_each_kind_of_instruction_with_the_share_that_was_followed():
    verdict = await InstructionFollowing().verify(SEA, "the sea, it is green")
    assert {part.name: part.reward for part in verdict.parts} == {COMMA: 0.0, WORDS: 1.0, KEYWORD: 0.5}


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        ([], "names no instructions"),
        ([{"id": "no:such"}], "there is no instruction 'no:such'"),
        ([{"id": WORDS, "num_words": 3}], "missing required field `relation`"),
    ],
)
async def test_problem_without_valid_instructions_gives_a_verifier_error(named, reason):
    verdict = await InstructionFollowing().verify(problem(instructions=named), "x")
    assert verdict.outcome is Outcome.VERIFIER_ERROR
    assert reason in verdict.reason


async def test_long_answers_judged_in_a_worker_get_the_same_verdicts_as_short_ones():
    verifier = InstructionFollowing(deadline_s=PATIENCE_S)
    try:
        short, long = [await verifier.verify(SEA, "the sea is blue " * times) for times in (1, 20_000)]
        assert short == long
        assert (await verifier.verify(SEA, "sea, " * 50_000)).reward == 0.5
    finally:
        await verifier.close()
