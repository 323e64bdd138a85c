"""Episodes with a tool that the recipe offers, with and without an agent: a scripted model, the real gateway."""

import json
from collections.abc import Awaitable, Callable
from typing import final

import pytest

from pipelinerl.actor.actor import VerifierTally
from pipelinerl.actor.group_maker import GroupProgress
from pipelinerl.errors import PipelineError
from pipelinerl.plugins.episodes.client import ChatRefused, EpisodeClient
from pipelinerl.plugins.episodes.host_pool import EpisodeEnd
from pipelinerl.plugins.episodes.tool_loop import OneRequest, Toolbox
from pipelinerl.plugins.episodes.trial import ScriptedAnswers
from pipelinerl.system.http_client import hot_session
from pipelinerl.types import Outcome
from pipelinerl.verifiers.verifier import PerAnswerVerifier, correct, wrong
from tests.fakes.episodes import episodes
from tests.fakes.talking_sampler import order
from tests.fakes.tool_model import tool_chat
from tests.patience import PATIENCE_S

HELLO = {"role": "user", "content": "hello"}


class Shout:
    name, description, argument = "shout", "Return the text in capitals.", "text"

    async def call(self, text):
        if text == "lost":
            raise PipelineError("the sandbox is lost")
        return text.upper(), text == "bad"

    async def start(self): ...

    async def close(self): ...


class IsAB:
    async def verify(self, problem, completion_text):
        return correct("AB") if completion_text == "AB" else wrong("it is not AB")


#: An agent: user code that plays an episode. In these tests, it runs in the test's process.
Agent = Callable[[EpisodeClient], Awaitable[None]]


@final
class Played:
    """An episode player that runs the agent in the test's process instead of in a separate host process."""

    def __init__(self, agent):
        self.agent = agent

    async def play(self, task, *, base_url, api_key, timeout_s):
        async with hot_session(token=None, keep_alive_s=1) as session:
            await self.agent(EpisodeClient(session, base_url=base_url, api_key=api_key))
        return EpisodeEnd(how="returned")

    async def start(self): ...

    async def close(self): ...


def call(name="shout", **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def played(answers, *, max_turns=4, count=1, progress=None, agent=None):
    player, sampler = OneRequest() if agent is None else Played(agent), ScriptedAnswers(tool_chat(), answers)
    about = {"verifier": PerAnswerVerifier(IsAB()), "tools": Toolbox(Shout()), "max_turns": max_turns}
    async with episodes(player, sampler, **about) as maker:
        for _ in range(count):
            (made,) = await maker.make(order(max_tokens=256), progress or GroupProgress())
    return made


async def test_tool_result_is_sent_to_the_model_and_the_models_last_answer_is_judged():
    made = await played([call(text="ab"), "AB"])
    first, second = made.rollout.turns
    shown = tool_chat().decode(second.context_token_ids.tolist())
    assert "<tool_response>\nAB\n</tool_response>" in shown and second.begins == ""
    assert '"name": "shout"' in tool_chat().decode(first.context_token_ids.tolist())
    assert made.rollout.verdict.outcome is Outcome.CORRECT


@pytest.mark.parametrize(
    ("wrong_call", "reply"),
    [
        (call("whisper", text="ab"), "there is no tool 'whisper'; available: shout"),
        (call(text=3), 'the arguments must be {"text": "…"}'),
        (call(txt="ab"), 'the arguments must be {"text": "…"}'),
    ],
)
async def test_model_gets_the_error_as_the_result_of_an_invalid_tool_call(wrong_call, reply):
    made = await played([wrong_call, "AB"])
    assert reply in tool_chat().decode(made.rollout.turns[1].context_token_ids.tolist())
    assert made.rollout.verdict.outcome is Outcome.CORRECT


async def test_tool_calls_end_at_max_turns_and_a_lost_sandbox_gives_a_verifier_error():
    made = await played([call(text="ab")] * 3, max_turns=2)
    assert (len(made.rollout.turns), made.rollout.verdict.outcome) == (2, Outcome.WRONG)
    made = await played([call(text="lost"), "AB"])
    assert made.rollout.verdict.outcome is Outcome.VERIFIER_ERROR and "is lost" in made.rollout.verdict.reason


async def test_agent_sees_only_the_final_answer_after_tool_calls_but_all_turns_are_in_one_segment():
    seen = []

    async def agent(client):
        first = await client.chat([HELLO])
        second = await client.chat([HELLO, first, {"role": "user", "content": "more"}])
        seen.extend([first.message, second.message])

    made = await played([call(text="ab"), "so", call(text="cd"), "AB"], agent=agent)
    assert [message["content"] for message in seen] == ["so", "AB"] and "tool_calls" not in seen[0]
    assert [turn.begins for turn in made.rollout.turns] == ["first", "", "", ""]
    shown = tool_chat().decode(made.rollout.turns[2].context_token_ids.tolist())
    assert "more" in shown and "hello" not in shown
    assert made.rollout.verdict.outcome is Outcome.CORRECT


async def test_agent_calls_its_own_tool_and_the_model_reads_the_results_of_both_tools():
    own = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}

    async def agent(client):
        first = await client.chat([HELLO], tools=[own])
        (own_call,) = first.tool_calls
        assert own_call["function"]["name"] == "add"
        result = {"role": "tool", "tool_call_id": own_call["id"], "content": "five"}
        await client.chat([HELLO, first, result], tools=[own])

    made = await played([call(text="ab") + call("add"), "AB"], agent=agent)
    second = made.rollout.turns[1]
    shown = tool_chat().decode(second.context_token_ids.tolist())
    assert shown.index("\nAB\n") < shown.index("five") and second.begins == ""


async def test_agent_that_repeats_a_request_discards_the_turns_of_its_tool_call_from_the_rollout():
    async def agent(client):
        await client.chat([HELLO])
        await client.chat([HELLO])

    made = await played([call(text="ab"), "unread", call(text="cd"), "AB"], agent=agent)
    assert len(made.rollout.turns) == 2 and made.rollout.turns[0].begins == "first"


async def test_agents_tool_with_the_name_of_a_recipes_tool_is_rejected():
    own = {"type": "function", "function": {"name": "shout", "description": "", "parameters": {"type": "object"}}}

    async def agent(client):
        with pytest.raises(ChatRefused, match="'shout' is a tool of the recipe"):
            await client.chat([HELLO], tools=[own])
        await client.chat([HELLO])

    assert len((await played(["AB"], agent=agent)).rollout.turns) == 1


async def test_tool_calls_are_counted_as_parsed_or_malformed():
    tally = VerifierTally()
    progress = GroupProgress()
    broken = call(text="ab").replace("}}", "}")
    await played([call(text="ab") + call(text="bad"), broken, "AB"], count=2, progress=progress)
    for calls, environment_s in progress.episodes:
        tally.note_episode("talk", calls, environment_s)
    figures = tally.by_domain["talk"]
    assert (figures.tool_episodes, figures.calls_parsed, figures.calls_malformed) == (2, 2, 1)
    assert (figures.episodes, figures.tool_errors) == (2, 1) and 0 <= figures.environment_s < PATIENCE_S


async def test_actor_logs_one_warning_if_tools_are_offered_but_not_called_in_the_first_episodes(caplog):
    await played(["AB"] * 25, count=25)
    (warning,) = [record.getMessage() for record in caplog.records if "tools are offered" in record.getMessage()]
    assert "domain talk: tools are offered, and none of the first 20 episodes" in warning
