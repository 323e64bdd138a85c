"""Environments on OpenEnv servers, tested with a fake server and, in slow tests, with a server of OpenEnv's package."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from types import FunctionType
from typing import final

import pytest
from aiohttp import WSMsgType, web

from pipelinerl.actor.group_maker import GroupProgress
from pipelinerl.errors import AddressError, ReferenceFailed
from pipelinerl.plugins.episodes.host_pool import EpisodeHosts
from pipelinerl.plugins.episodes.openenv import Actions, OpenEnv
from pipelinerl.plugins.episodes.trial import ScriptedAnswers
from pipelinerl.plugins.episodes.user_code import load_play
from pipelinerl.types import Outcome
from tests.fakes.episodes import episodes
from tests.fakes.raw_server import raw_server, response, sending
from tests.fakes.talking_sampler import TalkingSampler, order, tokenizer
from tests.fakes.tool_model import tool_chat
from tests.patience import PATIENCE_S

#: A program that serves a guessing game with OpenEnv's package. The fake `Server` below serves the same game.
REAL = """
from typing import Optional
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    letter: str

class Hint(Observation):
    hint: str = ""

class Game(Environment):
    def __init__(self):
        super().__init__()
        self.word = "b"
    def reset(self, seed: Optional[int] = None, episode_id: Optional[str] = None, word: str = "b", **_) -> Hint:
        self.word = word
        return Hint(hint="guess a letter")
    def step(self, action: Guess, timeout_s=None, **_) -> Hint:
        if action.letter == "!":
            raise RuntimeError("broken")
        right = action.letter == self.word
        return Hint(hint="right" if right else "no", reward=1.0 if right else -0.25, done=right)
    @property
    def state(self) -> State:
        return State()

import sys
if sys.argv[2] == "text":
    app = create_app(Game, Guess, Hint, env_name="game")
else:
    from fastmcp import FastMCP
    from openenv.core.env_server.mcp_environment import MCPEnvironment
    from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

    class Tools(MCPEnvironment):
        def __init__(self):
            mcp = FastMCP("tools")
            @mcp.tool
            def double(number: int) -> int:
                'Double a number.'
                return 2 * number
            super().__init__(mcp)
        def reset(self, seed=None, episode_id=None, **_):
            return Observation(metadata={"hint": "double 4"})
        def _step_impl(self, action, timeout_s=None, **_):
            raise RuntimeError("no such action")
        @property
        def state(self):
            return State()

    app = create_app(Tools, CallToolAction, CallToolObservation, env_name="tools")
if __name__ == "__main__":
    import uvicorn
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""
LETTER = {"type": "string", "title": "Letter"}
METADATA = {"type": "object", "additionalProperties": True}
CALL_SCHEMA = {
    "properties": {"metadata": METADATA, "type": {"const": "call_tool"}, "tool_name": LETTER, "arguments": METADATA},
    "required": ["tool_name"],
}
SCHEMA = {"properties": {"metadata": METADATA, "letter": LETTER}, "required": ["letter"], "type": "object"}


@final
class Server:
    """A fake OpenEnv server of the guessing game. It allows one session at a time, as OpenEnv does by default."""

    def __init__(self, *, calls=False):
        self.calls = calls
        self.taken = self.refused = 0
        self.reset = []
        self.app = web.Application()
        self.app.add_routes([web.get("/schema", self.schema), web.get("/ws", self.session)])

    async def schema(self, request):
        return web.json_response({"action": CALL_SCHEMA if self.calls else SCHEMA, "observation": {}, "state": {}})

    async def session(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.taken:
            self.refused += 1
            await socket.send_json({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}})
            return socket
        self.taken += 1
        try:
            async for message in socket:
                received = json.loads(message.data) if message.type is WSMsgType.TEXT else {}
                if received.get("type") == "close":
                    break
                await socket.send_json(self.answer(received["type"], received["data"]))
        finally:
            self.taken -= 1
        return socket

    def answer(self, kind, data):
        if kind == "reset":
            self.reset.append(data)
            return self.observed("guess a letter")
        if self.calls:
            return self.called(data)
        if data["letter"] == "!":
            return {"type": "error", "data": {"message": "broken", "code": "EXECUTION_ERROR"}}
        right = data["letter"] == self.reset[-1].get("word", "b")
        return self.observed("right" if right else "no", 1.0 if right else -0.25, done=right)

    def called(self, data):
        tool = {"name": "double", "description": "Double a number.", "input_schema": {"type": "object"}}
        observed = {"tools": [tool]}
        if data["type"] == "call_tool":
            number = data["arguments"]["number"]
            result = {"content": [{"type": "text", "text": str(2 * number), "meta": None}], "is_error": False}
            error = {"error_type": "execution_error", "message": "1 validation error for call[double]"}
            is_number = isinstance(number, int)
            observed = {"tool_name": "double"} | ({"result": result} if is_number else {"result": None, "error": error})
        return {"type": "observation", "data": {"observation": observed, "reward": None, "done": False}}

    def observed(self, hint, reward=None, *, done=False):
        return {"type": "observation", "data": {"observation": {"hint": hint}, "reward": reward, "done": done}}


@asynccontextmanager
async def serving(server, port=0):
    runner = web.AppRunner(server.app, shutdown_timeout=0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


async def check_the_tools(url):
    words = tool_chat()
    sampler = ScriptedAnswers(words, [call("double", number=4), call("double", number="x"), "8"])
    (rollout,) = await played(url, sampler)
    first, second, third = (words.decode(turn.context_token_ids.tolist()) for turn in rollout.rollout.turns)
    assert '"name": "double"' in first and "<tool_response>\n8\n</tool_response>" in second
    assert "<tool_response>\nerror: 1 validation error" in third and rollout.rollout.verdict.reward == 0


async def played(url, script, *, samples=1, **options):
    sampler = TalkingSampler(script) if isinstance(script, FunctionType) else script
    async with episodes(EpisodeHosts(f"openenv:{url}", options), sampler) as maker:
        return list(await maker.make(order(samples=samples, max_tokens=256), GroupProgress()))


async def check_the_game(url):
    (made,) = await played(url, lambda messages: "a" if len(messages) == 1 else "b")
    first, second = made.rollout.turns
    assert tokenizer().decode(first.context_token_ids.tolist()).count("guess a letter") == 1
    assert "no" in tokenizer().decode(second.context_token_ids.tolist())
    assert (first.reward, second.reward, second.begins) == (-0.25, 1.0, "")
    assert (made.rollout.verdict.outcome, made.rollout.verdict.reward) == (Outcome.PARTIAL, 0.75)
    (made,) = await played(url, lambda messages: "c", reset={"word": "c"})
    assert made.rollout.verdict.outcome is Outcome.CORRECT
    (made,) = await played(url, lambda messages: "!")
    assert made.rollout.verdict.outcome is Outcome.VERIFIER_ERROR and "broken" in made.rollout.verdict.reason


async def test_each_step_of_an_openenv_episode_becomes_a_turn_with_the_steps_reward():
    server = Server()
    async with serving(server) as url:
        await check_the_game(url)


async def test_model_calls_the_tools_of_an_openenv_server():
    async with serving(Server(calls=True)) as url:
        await check_the_tools(url)


async def test_episodes_of_a_group_use_one_seed_and_run_one_after_another_on_a_server_with_one_session():
    server = Server()
    async with serving(server) as url:
        made = await played(url, lambda messages: "b", samples=3)
    assert [each.rollout.verdict.outcome for each in made] == [Outcome.CORRECT] * 3
    assert len({received["seed"] for received in server.reset}) == 1 and server.refused


async def test_episode_waits_for_a_restarting_openenv_server():
    async def later(port):
        await asyncio.sleep(1)
        async with serving(Server(), port):
            await asyncio.sleep(PATIENCE_S)

    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(serving(Server()))
        port = int(url.rpartition(":")[2])
        maker = episodes(EpisodeHosts(f"openenv:{url}"), TalkingSampler(lambda messages: "b"))
        async with maker as made:
            await made.make(order(), GroupProgress())
            await stack.aclose()
            restart = asyncio.create_task(later(port))
            (again,) = await made.make(order(), GroupProgress())
            restart.cancel()
    assert again.rollout.verdict.outcome is Outcome.CORRECT


@pytest.mark.parametrize(
    ("schema", "text", "action"),
    [
        (SCHEMA, " a ", {"letter": " a "}),
        ({"properties": {"n": {"type": "integer"}}}, "3", {"n": 3}),
        ({"properties": {"x": LETTER, "y": LETTER}}, 'I say {"x": "a", "y": "b"}.', {"x": "a", "y": "b"}),
        ({"properties": {"x": LETTER, "y": LETTER}, "required": ["y"]}, "a", {"y": "a"}),
    ],
)
def test_models_answer_is_converted_to_an_action_of_the_openenv_servers_schema(schema, text, action):
    assert Actions(schema, None).of(text) == action


def test_answer_that_is_no_valid_openenv_action_is_rejected_with_the_expected_form():
    with pytest.raises(ValueError, match="must be one JSON object"):
        Actions({"properties": {"x": LETTER, "y": LETTER}}, None).of("a")
    with pytest.raises(ReferenceFailed, match="have no 'z'; fields: x"):
        Actions({"properties": {"x": LETTER}}, "z")


async def test_error_names_the_server_that_is_down_or_is_not_an_openenv_server():
    with pytest.raises(ReferenceFailed, match="expected openenv:http://host:port"):
        load_play("openenv:nowhere")
    with pytest.raises(ReferenceFailed, match=r"environment_options: .*`letter`"):
        load_play("openenv:http://localhost:1", {"letter": "a"})
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    reasons = []
    async with raw_server(sending(response(b"", status=404))) as other:
        for url in (nobody, other):
            async with episodes(EpisodeHosts(f"openenv:{url}"), TalkingSampler()) as maker:
                reasons.append((await maker.play(order(), 0, GroupProgress())).judgement.verdict.reason)
    assert "cannot be reached" in reasons[0] and "start it, or fix the URL" in reasons[0]
    assert "is no OpenEnv server: GET /schema answered 404" in reasons[1]


@pytest.fixture(scope="module")
def openenv_python(tmp_path_factory):
    """Return the path of a Python with OpenEnv's package: $OPENENV_PYTHON, or a newly made virtual environment."""
    if existing := os.environ.get("OPENENV_PYTHON"):
        return existing
    home = tmp_path_factory.mktemp("openenv")
    subprocess.run([sys.executable, "-m", "venv", home], check=True, timeout=120)
    install = [home / "bin" / "pip", "install", "-q", "openenv>=0.10"]
    if subprocess.run(install, check=False, timeout=900).returncode:
        pytest.skip("left out: the package openenv cannot be installed here")
    return str(home / "bin" / "python")


@contextmanager
def real_server(openenv_python, tmp_path, kind):
    (tmp_path / "game.py").write_text(REAL)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([openenv_python, "game.py", str(port), kind], cwd=tmp_path)
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until and process.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.slow
async def test_tool_server_of_the_openenv_package_behaves_like_the_fake_server(openenv_python, tmp_path):
    with real_server(openenv_python, tmp_path, "tools") as url:
        await check_the_tools(url)


@pytest.mark.slow
async def test_game_server_of_the_openenv_package_behaves_like_the_fake_server(openenv_python, tmp_path):
    with real_server(openenv_python, tmp_path, "text") as url:
        await check_the_game(url)
        made = await played(url, lambda messages: "b", samples=2)
        assert [each.rollout.verdict.outcome for each in made] == [Outcome.CORRECT] * 2
        described = json.loads(urllib.request.urlopen(f"{url}/schema", timeout=10).read())["action"]
    assert described["properties"].keys() == SCHEMA["properties"].keys()
    assert described["required"] == SCHEMA["required"]


@pytest.mark.parametrize(
    "content",
    [
        *(
            response(body)
            for body in (b"[" * 200_000, b"\xff", b"[]", b"{}", b'{"action": 3}', b'{"action": {"required": 3}}')
        ),
        response(b'{"action": {"properties": [1]}}'),
        response(b"", status=307, location="http://other.example/schema"),
        response(b"x", content_encoding="gzip"),
        response(b"busy", status=529),
    ],
)
async def test_schema_of_a_server_that_describes_no_actions_is_an_error_that_names_the_server(content):
    async with raw_server(sending(content)) as url:
        with pytest.raises(AddressError, match=f"{url} is no OpenEnv server: "):
            await OpenEnv(url, {})._described()
