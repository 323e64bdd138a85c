"""Tests of groups of episodes: user code plays the episodes in real host processes; a scripted model answers."""

import asyncio
import sys

import pytest

from pipelinerl.actor.group_maker import GroupProgress
from pipelinerl.config.domains import DomainSection
from pipelinerl.errors import DeadlineError, PipelineError
from pipelinerl.plugins.episodes.command import Commands
from pipelinerl.plugins.episodes.environment import Task
from pipelinerl.plugins.episodes.host_pool import EpisodeEnd, EpisodeHosts
from pipelinerl.plugins.episodes.opening import places_of
from pipelinerl.plugins.episodes.tool_loop import OneRequest
from pipelinerl.types import ROOT, Outcome
from pipelinerl.verifiers.verifier import PerAnswerVerifier, correct, wrong
from pipelinerl.verifiers.worker_pool import num_cores
from tests.fakes.episodes import episodes
from tests.fakes.talking_sampler import TalkingSampler, order, tokenizer
from tests.patience import PATIENCE_S

CODE = """
import asyncio, json, os, time, urllib.request
from pathlib import Path

async def three(task, client):
    messages = list(task.messages)
    for _ in range(3):
        answer = await client.chat(messages)
        if answer.content == task.ground_truth:
            return 1.0
        messages += [answer, {"role": "user", "content": "no"}]
    return 0.0

async def unjudged(task, client):
    await client.chat(task.messages)

async def rewarded(task, client):
    critic = client.agent("critic", trains=False)
    answer = await client.chat(task.messages)
    await critic.chat([{"role": "user", "content": "is it good?"}])
    await client.reward(0.25)
    await client.chat([*task.messages, answer, {"role": "user", "content": "more"}])
    await client.reward(0.5)
    return 0

async def branches(task, client):
    first = await client.chat(task.messages)
    for reply in ("left", "right"):
        await client.chat([*task.messages, first, {"role": "user", "content": reply}])
    await client.reward(0.25)
    await client.chat([{"role": "user", "content": "a summary"}])
    solver = client.agent("solver")
    await solver.chat([{"role": "user", "content": "solve it"}])
    await solver.reward(0.5)
    await client.agent("critic", trains=False).chat([{"role": "user", "content": "is it good?"}])
    return 0.0

async def raises(task, client):
    await client.chat(task.messages)
    raise ValueError("broken")

async def hangs(task, client):
    await client.chat(task.messages)
    await asyncio.sleep(3600)

async def blocks(task, client):
    await client.chat(task.messages)
    while True:
        time.sleep(0.1)

async def dies_once(task, client):
    await client.chat(task.messages)
    mark = Path(__file__).with_name("died")
    if not mark.exists():
        mark.touch()
        os._exit(1)
    return True

begun = 0

async def all_die(task, client):
    global begun
    begun += 1
    while begun < 4:
        await asyncio.sleep(0.01)
    os._exit(1)

async def never_stops(task, client):
    messages = list(task.messages)
    while True:
        answer = await client.chat(messages)
        messages += [answer, {"role": "user", "content": "no"}]

async def asks_nothing(task, client):
    return 1.0

async def repeats(task, client):
    answers = [await client.chat(task.messages) for _ in range(3)]
    return 1.0

class Game:
    def reset(self, task, seed):
        self.turns = 0
        return [{"role": "user", "content": "begin"}]

    async def step(self, answer):
        self.turns += 1
        return {"role": "user", "content": "go on"}, 0.5, self.turns == 2

async def asks_by_url(task, client):
    body = json.dumps({"messages": list(task.messages)}).encode()
    url, headers = client.base_url + "/chat/completions", {"content-type": "application/json"}
    await asyncio.to_thread(urllib.request.urlopen, urllib.request.Request(url, body, headers))
    return 1.0

async def asks_a_text(task, client):
    await client.chat("hello")
"""
#: The correct answer, which the scripted model gives in the second turn.
SECOND = "b"


def second_is_right(messages):
    return SECOND if len(messages) > 1 else "a"


class IsB:
    async def verify(self, problem, completion_text):
        return correct("b") if completion_text == "b" else wrong("it is not b")


def hosts(path, name):
    file = path / "game.py"
    file.write_text(CODE)
    return EpisodeHosts(f"{file}:{name}")


async def played(path, name, *, samples=1, begun=lambda: None, **options):
    async with episodes(hosts(path, name), TalkingSampler(second_is_right), **options) as maker:
        return await maker.make(order(samples=samples), GroupProgress(begun))


async def played_by_script(path, script, sampler, **limits):
    """Play an episode by a program that calls the model, judged by `IsB`; return its outcome."""
    (path / "agent.py").write_text(f"import openai, sys\nclient = openai.OpenAI()\n{script}")
    player = Commands([sys.executable, str(path / "agent.py"), "say {task}"])
    async with episodes(player, sampler, verifier=PerAnswerVerifier(IsB()), **limits) as maker:
        (made,) = await maker.make(order(), GroupProgress())
    return made.rollout.verdict.outcome


async def test_rollout_contains_the_turns_of_its_episode(tmp_path):
    begun = []
    for made in await played(tmp_path, "three", samples=3, begun=lambda: begun.append(None)):
        turns, verdict = made.rollout.turns, made.rollout.verdict
        assert (len(turns), verdict.outcome, verdict.reward, made.text) == (2, Outcome.CORRECT, 1.0, "b")
        shown = [tokenizer().decode(ids.tolist()) for each in turns for ids in (each.context_token_ids, each.token_ids)]
        assert shown == ["<|user|>hello<|end|><|assistant|>", "a<|end|>", "<|user|>no<|end|><|assistant|>", "b<|end|>"]
        assert made.rollout.temperature == 0.5
        assert made.rollout.oldest_version < made.rollout.newest_version
    assert len(begun) == 1, "the group's age counts from its first turn"


@pytest.mark.parametrize(
    ("name", "outcome", "reward", "reason"),
    [
        ("rewarded", Outcome.PARTIAL, 0.75, ""),
        ("Game", Outcome.CORRECT, 1.0, ""),
        ("unjudged", Outcome.VERIFIER_ERROR, 0.0, "its domain names no verifier"),
        ("raises", Outcome.VERIFIER_ERROR, 0.0, "game.py:40: ValueError: broken"),
        ("never_stops", Outcome.WRONG, 0.0, "has had its 4 turns"),
    ],
)
async def test_result_of_an_episode_becomes_the_verdict_of_its_rollout(name, outcome, reward, reason, tmp_path):
    (made,) = await played(tmp_path, name)
    verdict = made.rollout.verdict
    assert (verdict.outcome, verdict.reward) == (outcome, reward) and reason in verdict.reason


async def test_branching_episode_becomes_a_rollout_of_several_segments(tmp_path, caplog):
    (made,) = await played(tmp_path, "branches", max_turns=6)
    assert (made.rollout.verdict.outcome, made.rollout.verdict.reward) == (Outcome.PARTIAL, 0.75)
    turns = made.rollout.turns
    assert [(each.agent, each.begins, each.reward) for each in turns] == [
        ("main", "first", 0.0),
        ("main", "", 0.0),
        ("main", "forked", 0.25),
        ("main", "history_differs", 0.0),
        ("solver", "first", 0.5),
    ]
    assert made.rollout.parents == (ROOT, 0, 0, ROOT, ROOT), "the critic's turn is no part of it"
    assert [list(each.trained) for each in made.rollout.segments] == [[0, 1], [2], [3], [4]]
    shown = tokenizer().decode([*turns[2].context_token_ids, *turns[2].token_ids])
    assert shown == "<|user|>right<|end|><|assistant|>b<|end|>"
    assert caplog.text.count("needs several segments (history_differs)") == 1


@pytest.mark.parametrize("name", ["hangs", pytest.param("blocks", marks=pytest.mark.slow)])
async def test_episode_that_exceeds_its_time_limit_has_outcome_timeout(name, tmp_path):
    (made,) = await played(tmp_path, name, timeout_s=2.0)
    assert made.rollout.verdict.outcome is Outcome.TIMEOUT
    assert made.rollout.verdict.reason == "the episode took longer than 2 s (episode.timeout_s)"


async def test_rewarded_episode_without_an_answer_counts_as_a_failure(tmp_path):
    progress = GroupProgress()
    async with episodes(hosts(tmp_path, "asks_nothing"), TalkingSampler()) as maker:
        with pytest.raises(PipelineError, match="the environment never asked the model"):
            await maker.make(order(), progress)
    assert [each.verdict.outcome for each in progress.judgements] == [Outcome.VERIFIER_ERROR]


async def test_actor_warns_of_answers_that_do_not_train_because_their_request_was_repeated(tmp_path, caplog):
    (made, _) = await played(tmp_path, "repeats", samples=2)
    assert len(made.rollout.turns) == 1
    assert caplog.text.count("so 2 of its answers do not train") == 1


async def test_episode_is_restarted_once_if_its_host_process_dies(tmp_path):
    (made,) = await played(tmp_path, "dies_once")
    assert made.rollout.verdict.outcome is Outcome.CORRECT and len(made.rollout.turns) == 1


async def test_death_of_a_host_process_with_several_episodes_counts_as_one_verifier_error(tmp_path):
    progress = GroupProgress()
    async with episodes(hosts(tmp_path, "all_die"), TalkingSampler(second_is_right)) as maker:
        with pytest.raises(PipelineError, match="the process that played this episode is gone: it ended with status 1"):
            await maker.make(order(samples=4), progress)
    assert [each.verdict.outcome for each in progress.judgements] == [Outcome.VERIFIER_ERROR]


async def test_host_process_whose_connection_is_closed_gets_no_further_episode(tmp_path):
    """Writing to a closed connection raises RuntimeError in uvloop, whereas asyncio discards the data silently."""
    player, task = hosts(tmp_path, "three"), Task.of(order().problem, seed=0)
    await player.start()
    player._hosts[0].child.lines.close()
    try:
        ended = await player.play(task, base_url="http://127.0.0.1:9", api_key="", timeout_s=PATIENCE_S)
    finally:
        await player.close()
    assert ended.how == "raised" and "127.0.0.1:9" in ended.reason


async def test_group_of_episodes_fails_if_no_engine_can_answer(tmp_path):
    def fail(_):
        raise DeadlineError("no engine completed the request")

    async with episodes(hosts(tmp_path, "three"), TalkingSampler(fail)) as maker:
        with pytest.raises(DeadlineError, match="no engine completed"):
            await maker.make(order(samples=2), GroupProgress())


async def test_group_fails_with_the_name_of_the_environment_that_cannot_be_loaded(tmp_path):
    async with episodes(hosts(tmp_path, "absent"), TalkingSampler()) as maker:
        with pytest.raises(PipelineError, match=r"model answered in no episode.*has no 'absent'"):
            await maker.make(order(), GroupProgress())


@pytest.fixture
def unreachable_proxy(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "example.org")
    monkeypatch.delenv("NO_PROXY", raising=False)


@pytest.mark.usefixtures("unreachable_proxy")
async def test_client_of_user_code_reaches_the_gateway_although_a_proxy_is_set(tmp_path):
    (made,) = await played(tmp_path, "asks_by_url")
    assert made.rollout.verdict.outcome is Outcome.CORRECT


@pytest.mark.usefixtures("unreachable_proxy")
async def test_verifier_judges_the_last_model_answer_if_an_external_command_plays_the_episode(tmp_path):
    script = (
        "said = client.chat.completions.create(model='m', messages=[{'role': 'user', 'content': sys.argv[1]}])\n"
        "sys.exit(0 if said.choices[0].message.content == 'b' else 3)\n"
    )
    sampler = TalkingSampler(lambda messages: "b" if messages[0].content == "say hello" else "a")
    assert await played_by_script(tmp_path, script, sampler) is Outcome.CORRECT


@pytest.mark.parametrize("limits", [{"max_turns": 2}, {"turn_tokens": 1}], ids=str)
async def test_episode_whose_command_fails_at_a_limit_is_judged_by_its_last_answer(limits, tmp_path):
    script = (
        "messages = [{'role': 'user', 'content': 'x'}]\n"
        "for _ in range(9):\n"
        "    answer = client.chat.completions.create(model='m', messages=messages).choices[0].message\n"
        "    messages += [answer.model_dump(), messages[0]]\n"
    )
    sampler = TalkingSampler(lambda messages: "b")
    assert await played_by_script(tmp_path, script, sampler, **limits) is Outcome.CORRECT


async def test_no_more_episodes_than_the_recipes_limit_run_at_once():
    running = most = 0

    class Player(OneRequest):
        async def play(self, task, *, base_url, api_key, timeout_s):
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.01)
            running -= 1
            return EpisodeEnd(how="returned")

    async with episodes(Player(), TalkingSampler(), places=asyncio.Semaphore(3)) as maker:
        with pytest.raises(PipelineError, match="never asked the model"):
            await maker.make(order(samples=10), GroupProgress())
    assert most == 3


def test_programs_are_limited_by_cores_and_episodes_in_hosts_are_not():
    def places(**keys):
        found = places_of(DomainSection(name="d", source="addition", **keys))
        return None if found is None else found._value

    command = {"command": ("true",), "verifier": "math_answer"}
    assert places(**command) == 4 * num_cores() and places(environment="game.py:play") is None
    assert places(**command, episode={"concurrent": 5}) == 5


async def test_messages_that_are_a_text_are_rejected(tmp_path):
    async with episodes(hosts(tmp_path, "asks_a_text"), TalkingSampler()) as maker:
        made = await maker.play(order(), 0, GroupProgress())
    assert "TypeError: messages must be a list of messages" in made.judgement.verdict.reason
