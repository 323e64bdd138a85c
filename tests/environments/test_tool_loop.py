"""Episodes with a built-in tool, without user code: a scripted model, real tokens and the real gateway."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import final

import pytest

from pipelinerl.actor.episodes import EpisodeDomain, Episodes
from pipelinerl.actor.group_maker import GroupProgress, MadeRollout, Unwatched
from pipelinerl.actor.verifier_tally import VerifierTally
from pipelinerl.commands.findings.trials import ScriptedAnswers
from pipelinerl.environments.environment import EpisodeLimits
from pipelinerl.environments.gateway import Gateway
from pipelinerl.environments.tool_loop import ToolLoop
from pipelinerl.errors import PipelineError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.types import Outcome, Problem, Verdict
from pipelinerl.verifiers.verifier import PerAnswerVerifier, correct, wrong
from tests.fakes.talking_sampler import order
from tests.fakes.tool_model import tool_tokenizer
from tests.patience import PATIENCE_S


class Shout:
    name, description, argument = "shout", "Return the text in capitals.", "text"

    async def call(self, text: str) -> str:
        if text == "lost":
            raise PipelineError("the sandbox is lost")
        return text.upper()

    async def start(self) -> None: ...

    async def close(self) -> None: ...


class IsAB:
    async def verify(self, problem: Problem, completion_text: str) -> Verdict:
        return correct("AB") if completion_text == "AB" else wrong("it is not AB")


def call(name: str = "shout", **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def tokenizer() -> ChatTokenizer:
    made = tool_tokenizer()
    return ChatTokenizer(made, {made.convert_tokens_to_ids("<|end|>")})


async def played(
    answers: Sequence[str], *, max_turns: int = 4, episodes: int = 1, progress: GroupProgress | None = None
) -> MadeRollout:
    loop, gateway = ToolLoop(Shout()), Gateway()
    domain = EpisodeDomain(
        player=loop, limits=EpisodeLimits(max_turns=max_turns), verifier=PerAnswerVerifier(IsAB()), correct_at=1.0
    )
    maker = Episodes(gateway, ScriptedAnswers(tokenizer(), answers), {"talk": domain}, attempts=1)
    async with asyncio.timeout(PATIENCE_S), gateway.serve():
        try:
            for _ in range(episodes):
                (made,) = await maker.make(order(max_tokens=256), progress or Unwatched())
        finally:
            await domain.close()
    return made


async def test_tool_result_goes_back_to_the_model_and_its_last_answer_is_judged() -> None:
    made = await played([call(text="ab"), "AB"])
    first, second = made.rollout.turns
    shown = tokenizer().decode(second.context_token_ids.tolist())
    assert "<tool_response>\nAB\n</tool_response>" in shown and second.begins == ""
    assert '"name": "shout"' in tokenizer().decode(first.context_token_ids.tolist())
    assert made.rollout.verdict.outcome is Outcome.CORRECT


@pytest.mark.parametrize(
    ("wrong_call", "reply"),
    [
        (call("whisper", text="ab"), "there is no tool 'whisper'; available: shout"),
        (call(text=3), 'the arguments must be {"text": "…"}'),
        (call(txt="ab"), 'the arguments must be {"text": "…"}'),
    ],
)
async def test_invalid_tool_call_is_answered_with_the_error(wrong_call: str, reply: str) -> None:
    made = await played([wrong_call, "AB"])
    assert reply in tokenizer().decode(made.rollout.turns[1].context_token_ids.tolist())
    assert made.rollout.verdict.outcome is Outcome.CORRECT


async def test_tool_calls_end_at_max_turns_and_a_lost_sandbox_masks_the_rollout() -> None:
    made = await played([call(text="ab")] * 3, max_turns=2)
    assert (len(made.rollout.turns), made.rollout.verdict.outcome) == (2, Outcome.WRONG)
    made = await played([call(text="lost"), "AB"])
    assert made.rollout.verdict.outcome is Outcome.VERIFIER_ERROR and "is lost" in made.rollout.verdict.reason


@final
class Calls:
    """Counts tool calls as an actor does."""

    def __init__(self) -> None:
        self.tally, quiet = VerifierTally(), Unwatched()
        self.begun, self.handed_over, self.resampled = quiet.begun, quiet.handed_over, quiet.resampled
        self.sampled, self.judged = quiet.sampled, quiet.judged

    def called(self, *, parsed: int, malformed: int) -> None:
        self.tally.note_calls("talk", parsed=parsed, malformed=malformed)


async def test_tool_calls_are_counted_as_parsed_or_malformed() -> None:
    calls = Calls()
    broken = call(text="ab").replace("}}", "}")
    await played([call(text="ab") * 2, broken, "AB"], episodes=2, progress=calls)
    figures = calls.tally.by_domain["talk"]
    assert (figures.tool_episodes, figures.calls_parsed, figures.calls_malformed) == (2, 2, 1)


async def test_actor_warns_once_if_the_first_episodes_call_no_tool(caplog: pytest.LogCaptureFixture) -> None:
    await played(["AB"] * 25, episodes=25)
    (warning,) = [record.getMessage() for record in caplog.records if "tools are offered" in record.getMessage()]
    assert "domain talk: tools are offered, and none of the first 20 episodes" in warning
