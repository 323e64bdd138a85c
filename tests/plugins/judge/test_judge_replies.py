"""Judges that reply with anything: a valid verdict, or a masked answer with a reason that names the judge."""

import asyncio
import json
from random import Random

import msgspec
import pytest

from pipelinerl.types import Outcome
from tests.fakes.hostile_replies import NODES, mutated
from tests.fakes.raw_server import raw_server, response
from tests.patience import PATIENCE_S
from tests.plugins.judge.test_verifier import judging, verdicts

SCORE = 4
COMPLETION = {
    "id": "x",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": json.dumps({"reason": "r", "score": SCORE})},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
}


def reply(draw):
    """Return the body of a judge's response, mutated as a whole or within the text of the message."""
    if draw.random() < 0.5:
        return mutated(COMPLETION, draw)
    content = mutated({"reason": "r", "score": SCORE}, draw).decode(errors="replace")
    choice = {"message": {"role": "assistant", "content": content}}
    return json.dumps({"choices": [choice]}).encode()


@pytest.mark.parametrize("cases", [200, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_any_reply_of_a_judge_gives_a_valid_verdict_or_masks_the_answer(cases):
    draw = Random(cases)
    body = b""

    async def send(head, writer):
        writer.write(response(body))

    outcomes = []
    async with raw_server(send) as url, judging(url, model="small", timeout_s=PATIENCE_S, most_tokens=10**18) as judge:
        for number in range(cases):
            body = reply(draw)
            async with asyncio.timeout(PATIENCE_S):
                (verdict,) = await verdicts(judge, f"answer {number}")
            msgspec.msgpack.encode(verdict)
            outcomes.append(verdict.outcome)
            if verdict.outcome is Outcome.VERIFIER_ERROR:
                assert url in verdict.reason and verdict.reward == 0.0, (body[:200], verdict)
            else:  # the score of the reply, or another that was written in its place
                assert verdict.reward * 9 + 1 in (SCORE, *_scores_in(body)), (body[:200], verdict)
    assert 0.1 < outcomes.count(Outcome.VERIFIER_ERROR) / cases < 0.95


def _scores_in(body):
    """Return the valid scores, 1 to 10, that mutations write into a reply, read without the judge's code."""
    text = body.decode(errors="replace").replace("\\", "")
    digits = {str(number) for number in range(1, 11)} | {f"{SCORE}.0", "1.0"}
    return {float(each) for each in digits if f'"score": {each}' in text or f'"score": "{each}"' in text}


@pytest.mark.parametrize("node", NODES, ids=range(len(NODES)))
async def test_any_content_of_a_judges_message_is_masked(node):
    body = '{"choices": [{"message": {"content": ' + node + "}}]}"

    async def send(head, writer):
        writer.write(response(body.encode()))

    async with raw_server(send) as url, judging(url, model="small") as judge:
        (verdict,) = await verdicts(judge, "x")
    assert verdict.outcome is Outcome.VERIFIER_ERROR and url in verdict.reason
