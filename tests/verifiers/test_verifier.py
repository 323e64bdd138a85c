"""A weighted sum of rewards: the sum, the reward of each part, and parts that fail."""

import json
from typing import final

import pytest
from pydantic import ValidationError

from pipelinerl.config.domains import DomainSection
from pipelinerl.roles.verification import open_verifier
from pipelinerl.types import Outcome, RewardPart, Verdict
from pipelinerl.verifiers.verifier import Judgement, SampledAnswer, WeightedPart, WeightedSum, failed, timed_out
from tests.fakes.problems import problem

PROBLEM = problem("42")


def given(reward, **fields):
    return Verdict(outcome=Outcome.WRONG, reward=reward, **fields)


@final
class Says:
    def __init__(self, verdict):
        self._verdict = verdict
        self.closed = False

    async def judge(self, problem, answers):
        return [Judgement(self._verdict, 0.5)] * len(answers)

    async def close(self):
        self.closed = True


async def summed(*verdicts, weights, correct_at=1.0):
    parts = [WeightedPart(f"p{i}", weights[i], Says(verdict)) for i, verdict in enumerate(verdicts)]
    (judgement,) = await WeightedSum(parts, correct_at=correct_at).judge(PROBLEM, [SampledAnswer("a")])
    return judgement


async def test_weighted_sum_of_rewards_reports_the_sum_and_the_unweighted_reward_of_each_part():
    verdict, seconds = await summed(given(0.5, reason="so"), given(2.0, answer="x"), weights=(0.2, 0.25))
    assert verdict == Verdict(
        outcome=Outcome.PARTIAL,
        reward=0.6,
        reason="p0: so",
        answer="x",
        parts=(RewardPart("p0", 0.5), RewardPart("p1", 2.0)),
    )
    assert seconds == 1.0


async def test_answer_whose_reward_misses_the_threshold_correct_at_only_by_rounding_is_correct():
    three = [given(1.0)] * 3
    assert sum((0.7, 0.2, 0.1)) < 1.0
    assert (await summed(*three, weights=(0.7, 0.2, 0.1))).verdict.outcome is Outcome.CORRECT
    assert (await summed(*three, weights=(0.1, 0.2, 0.6))).verdict.outcome is Outcome.PARTIAL
    assert (await summed(*three, weights=(0.1, 0.2, 0.6), correct_at=0.9)).verdict.outcome is Outcome.CORRECT


@pytest.mark.parametrize("verdict", [failed("broke"), timed_out(3.0)])
async def test_answer_gets_no_reward_if_one_part_of_the_reward_fails_to_judge_it(verdict):
    combined = (await summed(given(1.0), verdict, weights=(1.0, 1.0))).verdict
    assert (combined.outcome, combined.reward, combined.reason) == (verdict.outcome, 0.0, f"p1: {verdict.reason}")


async def test_recipe_can_combine_reward_functions_and_verifiers(tmp_path):
    (tmp_path / "r.py").write_text("def short(completion): return len(completion) < 20\n")
    rewards = [{"function": f"{tmp_path}/r.py:short", "weight": 0.5}, {"function": "math_answer", "name": "math"}]
    verifier = open_verifier(
        DomainSection.model_validate_json(json.dumps({"name": "d", "source": "addition", "rewards": rewards}))
    )
    try:
        texts = ["42", "43", "so after all the answer is 42"]
        judged = await verifier.judge(PROBLEM, [SampledAnswer(text) for text in texts])
    finally:
        await verifier.close()
    assert [j.verdict.reward for j in judged] == [1.5, 0.5, 1.0]
    assert [j.verdict.outcome.value for j in judged] == ["correct", "partial", "correct"]
    assert judged[2].verdict.parts == (RewardPart("short", 0.0), RewardPart("math", 1.0))
    assert judged[2].verdict.answer == "42"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"verifier": "math_answer", "rewards": [{"function": "math_answer"}]}, "verifier and rewards exclude"),
        ({"rewards": [{"function": "a.py:f"}, {"function": "b.py:f"}]}, "must have unique names, got f, f"),
        ({"rewards": [{"function": "a.py:f", "weight": 0.0}]}, "rewards.weight must not be 0, as it is for f"),
    ],
)  # fmt: skip
def test_invalid_settings_of_a_domains_verifiers_are_rejected(fields, sentence):
    with pytest.raises(ValidationError, match=sentence):
        DomainSection.model_validate({"name": "d", "source": "addition", **fields}, strict=False)
