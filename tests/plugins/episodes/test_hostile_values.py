"""Hostile servers, programs and hosts: a bad message, task or end is masked with its source, and ends nothing else."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from random import Random
from types import SimpleNamespace
from typing import Any, final

import pytest
from aiohttp import WSMsgType

from pipelinerl.plugins.episodes.command import Commands
from pipelinerl.plugins.episodes.environment import Task
from pipelinerl.plugins.episodes.host_pool import EpisodeHosts, HostLost
from pipelinerl.plugins.episodes.openenv import InvalidAction, OpenEnvSession, ServerMalformed, ServerRefused
from tests.fakes.hostile_replies import mutated
from tests.patience import PATIENCE_S, is_running, wait_until

URL = "http://server:8000"
FRAMES: list[dict[str, Any]] = [
    {"type": "observation", "data": {"observation": {"hint": "x"}, "reward": 0.5, "done": False}},
    {"type": "error", "data": {"message": "broken", "code": "EXECUTION_ERROR", "errors": [{"loc": ["a"], "msg": "b"}]}},
    {"type": "error", "data": {"message": "no such word", "code": "VALIDATION_ERROR"}},
]


@final
class Socket:
    """The receiving end of a connection whose server sends one given frame."""

    def __init__(self, data):
        self._data = data

    async def send_json(self, _): ...

    async def receive(self):
        return SimpleNamespace(type=WSMsgType.TEXT, data=self._data)


@pytest.mark.parametrize("numbers", [range(200), pytest.param(range(10_000), marks=pytest.mark.slow)])
async def test_only_an_action_that_an_openenv_server_calls_invalid_is_the_models_fault(numbers):
    for number in numbers:
        draw = Random(number)
        frame = draw.choice(FRAMES)
        text = mutated(frame, draw).decode(errors="replace")
        try:
            observed = await OpenEnvSession(Socket(text), URL).step({"word": "x"})
        except InvalidAction:
            assert json.loads(text)["data"]["code"] == "VALIDATION_ERROR", text
        except ServerMalformed as error:
            assert URL in str(error) and len(str(error)) < 2000
        except ServerRefused as error:
            assert frame["type"] == "error" and "the OpenEnv server" in str(error)
        else:
            check_observed(observed, text)


def check_observed(observed, text):
    sent = json.loads(text)["data"]
    assert type(observed.done) is bool and observed.done == sent.get("done", False)
    assert observed.reward is None or (type(sent["reward"]) in (int, float) and observed.reward == sent["reward"])


HOST = """
import asyncio, os, subprocess, sys
from pathlib import Path

async def play(task, client):
    match task.problem_id:
        case "generator exit":
            raise GeneratorExit
        case "cancelled":
            raise asyncio.CancelledError
        case "long":
            raise ValueError("x" * 70_000_000)
        case "task exits":
            asyncio.create_task(exits())
            await asyncio.sleep(0.1)
            return 0.5
        case "forks":
            child = os.fork()
            if child:
                os.waitpid(child, 0)
            return 0.25
        case "stray":
            for number in range(3, 64):
                try:
                    if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                        os.write(number, b"hello\\n")
                except OSError:
                    pass
            await asyncio.sleep(600)
        case "child":
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            Path(__file__).with_name("pid").write_text(str(child.pid))
        case "aborts":
            os.abort()
        case "waits":
            await asyncio.sleep(600)
    return 1.0

async def exits():
    sys.exit("of a task")

class Stops:
    def reset(self, task, seed):
        return next(iter(()))
    def step(self, answer):
        ...
"""


def task(name, text=""):
    return Task(problem_id=name, domain="d", messages=({"role": "user", "content": text},), ground_truth="")


@asynccontextmanager
async def hosts(folder, name="play"):
    (folder / "game.py").write_text(HOST)
    made = EpisodeHosts(f"{folder / 'game.py'}:{name}")
    try:
        async with asyncio.timeout(PATIENCE_S):
            yield made
    finally:
        await made.close()


async def test_options_of_an_environment_are_in_no_command_line(tmp_path):
    file = tmp_path / "game.py"
    file.write_text(
        "import subprocess\n"
        "async def play(task, client, password):\n"
        "    shown = subprocess.run(['ps', '-ww', '-eo', 'args'], capture_output=True, text=True).stdout\n"
        "    return float('game.py:play' in shown and password not in shown and len(password))\n"
    )
    made = EpisodeHosts(f"{file}:play", {"password": "swordfish"})
    try:
        assert (await played(made, "any")).value == len("swordfish")
    finally:
        await made.close()


async def played(made, name):
    return await made.play(task(name), base_url="http://nowhere", api_key="k", timeout_s=PATIENCE_S)


async def test_every_way_to_leave_an_episode_sends_its_end_and_spares_its_neighbours(tmp_path):
    async with hosts(tmp_path) as made:
        neighbour = asyncio.create_task(played(made, "waits"))
        await made.start()
        names = ("generator exit", "cancelled", "long", "task exits", "forks", "child")
        ends = dict(zip(names, await asyncio.gather(*(played(made, name) for name in names)), strict=True))
        assert not neighbour.done() and len(made._hosts) == 1
        too_long = await made.play(task("x", "x" * 2**26), base_url="", api_key="", timeout_s=PATIENCE_S)
        assert too_long.how == "raised" and "shorten it" in too_long.reason
        child = int((tmp_path / "pid").read_text())
        assert is_running(child)
        neighbour.cancel()
    wait_until(lambda: not is_running(child), "the child in a session of its own has ended with the host")
    assert [ends[name].how for name in names] == ["raised"] * 3 + ["returned"] * 3
    assert all(f"{tmp_path / 'game.py'}:" in ends[name].reason for name in names[:3])
    assert "GeneratorExit" in ends["generator exit"].reason and "CancelledError" in ends["cancelled"].reason
    assert len(ends["long"].reason) == 1000
    assert (ends["task exits"].value, ends["forks"].value) == (0.5, 0.25)


@pytest.mark.parametrize(
    ("name", "reason"), [("stray", "is no message of an episode host"), ("aborts", "it was killed by SIGABRT")]
)
async def test_end_of_a_host_is_reported_to_all_its_episodes_with_its_cause(name, reason, tmp_path):
    async with hosts(tmp_path) as made:
        await made.start()
        neighbour = asyncio.create_task(played(made, "waits"))
        await asyncio.sleep(0)
        lost = await asyncio.gather(played(made, name), neighbour, return_exceptions=True)
    assert all(isinstance(each, HostLost) and reason in str(each) for each in lost)
    assert [each.is_first for each in lost if isinstance(each, HostLost)].count(True) == 1


async def test_method_that_raises_stop_iteration_ends_its_episode(tmp_path):
    async with hosts(tmp_path, "Stops") as made:
        ended = await played(made, "x")
    assert ended.how == "raised" and "game.py:" in ended.reason and "StopIteration" in ended.reason


async def run(*command, text="", timeout_s=PATIENCE_S):
    return await Commands(command).play(task("x", text), base_url="http://nowhere", api_key="k", timeout_s=timeout_s)


@pytest.mark.parametrize("text", ["x" * 200_000, "a\x00b"], ids=["long", "zero"])
async def test_task_that_no_argument_can_hold_is_masked_with_the_remedy_and_fits_into_a_file(text):
    ended = await run("true", "{task}", text=text)
    assert ended.how == "raised" and "pass a long one as {task_file}" in ended.reason
    compare = f"import sys; sys.exit(open(sys.argv[1]).read() != {text[:3]!r} + {text[3:4]!r} * {len(text) - 3})"
    assert (await run(sys.executable, "-c", compare, "{task_file}", text=text)).how == "returned"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 3", "sh ended with status 3: it wrote no errors"),
        ("kill -SEGV $$", "sh was killed by SIGSEGV"),
        ("printf 'a\\377\\nb\\377' >&2; exit 1", "sh ended with status 1: b\ufffd"),
        ("head -c 3000000 /dev/zero >&2; exit 1", "sh ended with status 1: "),
    ],
)
async def test_failed_program_is_reported_with_its_status_or_signal(script, reason):
    ended = await run("sh", "-c", script, text="\ud800{task_file}")
    assert ended.how == "raised" and ended.reason.startswith(reason) and len(ended.reason) < 5000


async def test_children_of_a_program_in_sessions_of_their_own_end_with_its_episode(tmp_path):
    file = tmp_path / "pid"
    start = f"setsid sleep 600 & echo $! > {file}.new; mv {file}.new {file}"
    assert (await run("sh", "-c", start)).how == "returned"
    assert not is_running(int(file.read_text()))
    file.unlink()
    with pytest.raises(TimeoutError):
        await run("sh", "-c", f"{start}; sleep 600", timeout_s=1.0)
    assert not is_running(int(file.read_text()))
