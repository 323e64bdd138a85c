"""An actor's process takes no work before its controller answers, and reports when the controller is lost."""

import asyncio
import logging
import subprocess
import sys
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from pipelinerl.config.learning import CurationSection
from pipelinerl.config.recipe import load
from pipelinerl.config.sections import VerificationSection
from pipelinerl.enums import VerifierLocation
from pipelinerl.errors import AddressError
from pipelinerl.messages import ACTORS_GROUP, PROMPTS, REPORTS, ROLLOUTS
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.verifier_service.server import create_app as create_service_app
from pipelinerl.plugins.verifier_service.wire import ServedDomain
from pipelinerl.roles import actor_role
from pipelinerl.roles.process import Identity
from pipelinerl.roles.verification import rules_of
from pipelinerl.streams.embedded_redis import EmbeddedRedis
from pipelinerl.streams.records import decode_group, encode_order
from pipelinerl.streams.stream import START
from pipelinerl.system.http_service import guard, listen, serve_until
from pipelinerl.system.machine import free_ports
from pipelinerl.types import Message, Outcome, Problem, PromptOrder, Purpose, Sampling
from tests.fakes import verifier_service
from tests.fakes.scripted_engine import ScriptedEngine, create_app
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S

TOKEN = "secret"
NAME = "actor-0"
DEADLINE_S = PATIENCE_S


@pytest.fixture
def identity(tmp_path):
    (port,) = free_ports(1)
    with EmbeddedRedis(tmp_path) as server:
        addresses = {"redis_url": server.url, "controller_url": f"http://127.0.0.1:{port}"}
        yield Identity(run_dir=tmp_path, config=load("tiny", ["run.name=test"]), name=NAME, token=TOKEN, **addresses)


@pytest.fixture
def engine():
    made = ScriptedEngine(token=TOKEN)
    made._serving = (1, 0)
    made._rendered = ChatTokenizer.load(load("tiny").model.resolved).encode_request
    with in_thread(create_app(made, token=TOKEN)) as url:
        yield url


@asynccontextmanager
async def controller(identity, *engines, token=TOKEN, verifiers=()):
    assignment = {"serving": engines, "finishing": [], "groups_in_flight": 4, "model_version": 0, "k": None}
    assignment["verifiers"] = verifiers
    app = FastAPI(openapi_url=None)
    app.get("/assignment")(lambda: assignment)
    guard(app, token=token)
    async with served(identity, app):
        yield


@asynccontextmanager
async def served(identity, app):
    over = asyncio.get_running_loop().create_future()
    port = int(identity.controller_url.rpartition(":")[2])
    serving = asyncio.create_task(serve_until(app, listen("127.0.0.1", port), over=over))
    try:
        yield
    finally:
        over.set_result(None)
        await asyncio.wait_for(serving, DEADLINE_S)


@asynccontextmanager
async def acting(identity):
    role = asyncio.create_task(actor_role.run(identity))
    try:
        yield role
    finally:
        role.cancel()
        await asyncio.gather(role, return_exceptions=True)


async def until(role, happened):
    async with asyncio.timeout(DEADLINE_S):
        while not await happened():
            assert not role.done(), role
            await asyncio.sleep(0.02)


def order(identity):
    domain = identity.config.domains[0].name
    problem = Problem(problem_id="1", domain=domain, messages=(Message("user", "say"),), ground_truth="it")
    sampling = Sampling(num_samples=2, temperature=1.0, max_tokens=4, stop=())
    return encode_order(
        PromptOrder(
            order_id="prompt-000001", index=1, purpose=Purpose.TRAINING, problem=problem, sampling=sampling, seed=1
        )
    )


async def indices(stream):
    entries = await stream.read({ROLLOUTS + NAME: START}, count=9, block_s=0)
    return [decode_group(entry.payload).index for entry in entries]


async def test_actor_claims_no_prompt_from_the_stream_before_its_controller_answers(
    identity, engine, monkeypatch, caplog
):
    """The controller starts after the actor, ends, and starts again; the actor logs each of these changes once."""
    monkeypatch.setattr(actor_role, "REFRESH_S", 0.02)
    caplog.set_level(logging.INFO, "pipelinerl")
    stream = await identity.stream()
    await stream.append(PROMPTS, [order(identity)])

    def logged(sentence):
        async def is_last():
            return any(sentence in record.getMessage() for record in caplog.records[-1:])

        return is_last

    async with acting(identity) as role:
        await until(
            role,
            logged(f"the controller at {identity.controller_url} does not answer (All connection attempts failed)"),
        )
        await asyncio.sleep(0.2)
        assert await stream.held(PROMPTS, group=ACTORS_GROUP, consumer=NAME) == []
        assert await stream.length(REPORTS) == 0, "the actor has not reported that it works"
        async with controller(identity, engine):
            await until(role, logged(" answers"))
            await until(role, lambda: indices(stream))
        await until(role, logged("the last assignment stays in force"))
        async with controller(identity, engine):
            await until(role, logged(" answers"))
            await asyncio.sleep(0.2)
            changes = [record for record in caplog.records if "serving at" not in record.getMessage()]
            assert [record.levelname for record in changes] == ["WARNING", "INFO", "WARNING", "INFO"]
    await stream.close()


async def test_actor_logs_that_a_server_is_not_a_controller_and_retries(identity, caplog):
    app = FastAPI(openapi_url=None)
    app.get("/assignment")(lambda: HTMLResponse("<html>"))
    guard(app, token=None)

    async def warned():
        return f"the server at {identity.controller_url} is not a controller (200 OK: JSON is malformed" in caplog.text

    async with served(identity, app), acting(identity) as role:
        await until(role, warned)


async def test_actor_exits_when_the_controller_rejects_its_authentication_token(identity):
    async with controller(identity, token="another"), acting(identity) as role:
        with pytest.raises(ExceptionGroup) as ended:
            await asyncio.wait_for(role, DEADLINE_S)
    assert ended.group_contains(AddressError, match="refuses this actor's token")


#: A user's verifier module NAME.py. It creates a file `NAME.up` when a verifier worker imports it, but not when the
#: actor does.
JUDGE = """
import sys
from pathlib import Path

if "pipelinerl.actor.actor" not in sys.modules:
    assert "broken" not in __file__
    Path(__file__).with_suffix(".up").touch()


def judge(correct=(), completion=""):
    return True
"""


async def test_verifiers_start_with_the_actor_before_its_controller_answers(identity, tmp_path):
    """A verifier that fails to start does not keep the other verifiers from starting."""
    for name in ("broken", "math", "code", "filter"):
        (tmp_path / f"{name}.py").write_text(JUDGE)
    domains = tuple(
        identity.config.domains[0].model_copy(update={"name": name, "verifier": f"{tmp_path / name}.py:judge"})
        for name in ("broken", "math", "code")
    )
    curation = CurationSection(filter=f"{tmp_path}/filter.py:judge")
    config = identity.config.model_copy(update={"domains": domains, "curation": curation})
    async with acting(replace(identity, config=config)) as role, asyncio.timeout(PATIENCE_S):
        while not all((tmp_path / f"{name}.up").exists() for name in ("math", "code", "filter")):
            assert not role.done(), role
            await asyncio.sleep(0.02)


async def test_actor_sends_answers_to_the_verifier_services_that_the_controller_names(identity, engine):
    """The actor waits for the verifier services: they may join after it has sent its first requests to the engine."""
    domain = identity.config.domains[0].model_copy(update={"name": "words", "verifier": "math_answer"})
    section = VerificationSection(judged_in=VerifierLocation.SERVICES)
    config = identity.config.model_copy(update={"domains": (domain,), "verification": section})
    served = ServedDomain(verifier=verifier_service.verifier("words"), rules=rules_of(domain), kept=False)
    app = create_service_app(verifier_service.service({"words": served}), token=TOKEN)
    stream = await identity.stream()
    await stream.append(PROMPTS, [order(replace(identity, config=config))])
    with in_thread(app) as url:
        lease = {"url": url, "incarnation": "1", "domains": {"words": rules_of(domain)}}
        async with controller(identity, engine, verifiers=[lease]), acting(replace(identity, config=config)) as role:
            await until(role, lambda: indices(stream))
    (entry,) = await stream.read({ROLLOUTS + NAME: START}, count=9, block_s=0)
    outcomes = [rollout.verdict.outcome for rollout in decode_group(entry.payload).rollouts]
    assert outcomes == [Outcome.WRONG, Outcome.WRONG], "by the function of the service, and by no worker of ours"
    await stream.close()


_LIGHT = """
import sys
from pathlib import Path
from pipelinerl.config.recipe import MODELS
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.roles import actor_role
from pipelinerl.types import Message
from pipelinerl.roles.process import Identity

tokenizer = ChatTokenizer.load(MODELS / "tiny_speller")
assert tokenizer.decode(tokenizer.encode_chat([Message("user", "ab")]))
assert not (heavy := {"torch", "fastapi", "uvicorn", "matplotlib"} & sys.modules.keys()), heavy
"""


def test_actor_does_not_import_torch():
    """Importing torch would triple the memory of an actor, and actors often share a machine with an engine."""
    subprocess.run([sys.executable, "-c", _LIGHT], check=True, timeout=PATIENCE_S)
