"""Servers other than ours get requests in OpenAI's format only, and their own error messages are reported."""

import json
import time
from contextlib import asynccontextmanager

import pytest

from pipelinerl.engines.http.openai_client import OpenAIServer, models_at
from pipelinerl.errors import AddressError, DeadlineError, EngineUnreachable
from pipelinerl.types import Message, Sampling
from tests.fakes.openai_server import OpenAIFake
from tests.fakes.raw_server import raw_server, response, sending
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S

ASKED = (Message("user", "1 + 1?"),)
SAMPLING = Sampling(num_samples=1, temperature=0.5, max_tokens=8, stop=("\n",))


COMPLETION = b'{"choices": [{"message": {"content": "2"}}]}'


@asynccontextmanager
async def served(*, failures=(), deadline_s=PATIENCE_S, **fields):
    """Yield a fake server that says `2`, after these statuses, and a client of it."""
    fake = OpenAIFake(lambda body: "2", failures=failures)
    with in_thread(fake.app) as url:
        async with OpenAIServer(
            url, **({"model": "small", "token": None, "deadline_s": deadline_s} | fields)
        ) as server:
            yield fake, server


@asynccontextmanager
async def replying(handler):
    async with raw_server(handler) as url, OpenAIServer(url, model="m", token=None, deadline_s=PATIENCE_S) as server:
        yield server


async def test_openai_server_gets_requests_in_openais_format():
    async with served(model="large", token="t") as (fake, server):
        assert await server.sample(ASKED, SAMPLING, seed=2**40 + 5) == ("2", "stop", 1, 3)
    (body,) = fake.bodies
    assert body["messages"] == [{"role": "user", "content": "1 + 1?"}]
    assert (body["model"], body["temperature"], body["stop"], body["seed"]) == ("large", 0.5, ["\n"], 5)
    assert fake.tokens == ["Bearer t"]


@pytest.mark.parametrize("failures", [(503, 429), (520,), (524,), (529,)])
async def test_failing_openai_server_is_retried_with_the_same_seed(failures):
    async with served(failures=failures) as (fake, server):
        assert (await server.sample(ASKED, SAMPLING, seed=7)).text == "2"
    assert [body["seed"] for body in fake.bodies] == [7] * (len(failures) + 1)


async def test_openai_server_is_retried_only_after_the_pause_that_it_requests():
    async def busy(head, writer):
        times.append(time.monotonic())
        writer.write(response(COMPLETION) if times[1:] else response(b"", status=429, retry_after="1"))

    times = []
    async with replying(busy) as server:
        assert (await server.sample(ASKED, SAMPLING, seed=7)).text == "2"
    assert times[1] - times[0] >= 1.0


async def test_fields_that_a_server_rejects_can_be_renamed_or_left_out():
    renamed = {"max_tokens": "max_completion_tokens", "temperature": "", "top_p": "", "seed": ""}
    async with served(fields=renamed) as (fake, server):
        with pytest.raises(EngineUnreachable, match="unknown field max_completion_tokens"):
            await server.sample(ASKED, SAMPLING, seed=0)
    assert fake.bodies[0].keys() == {"model", "messages", "max_completion_tokens", "stop"}
    refusing = response(b'{"error": {"message": "Unsupported parameter: max_tokens"}}', status=400)
    async with replying(sending(refusing)) as server:
        with pytest.raises(EngineUnreachable, match=r"request_fields can rename max_tokens, or leave it out$"):
            await server.sample(ASKED, SAMPLING, seed=0)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ("a\ud800", "a?"),
        (None, ""),
        ([], ""),
    ],
)
async def test_content_of_an_openai_server_may_be_parts(content, text):
    body = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
    async with replying(sending(response(body))) as server:
        assert await server.sample(ASKED, SAMPLING, seed=0) == (text, "stop", None, None)


async def test_request_that_an_openai_server_rejects_is_not_retried():
    async with served(failures=(400,)) as (fake, server):
        with pytest.raises(EngineUnreachable, match="refused the request: HTTP 400: not now"):
            await server.sample(ASKED, SAMPLING, seed=0)
    assert len(fake.bodies) == 1


async def test_failing_openai_server_is_retried_until_the_deadline():
    async with served(failures=(500,) * 100, deadline_s=0.5) as (_, server):
        with pytest.raises(DeadlineError, match=r"no answer within 0.5 s; last: HTTP 500: not now"):
            await server.sample(ASKED, SAMPLING, seed=0)


@pytest.mark.parametrize("answer", [{}, {"choices": []}, {"choices": [{"message": None}]}, [1]])
async def test_response_that_is_no_chat_completion_is_rejected(answer):
    async with replying(sending(response(json.dumps(answer).encode()))) as server:
        with pytest.raises(EngineUnreachable, match="must answer with a chat completion in OpenAI's shape"):
            await server.sample(ASKED, SAMPLING, seed=0)


async def test_models_of_a_server_are_listed_or_an_error_names_its_address():
    with pytest.raises(AddressError, match=r"GET http://127.0.0.1:9/v1/models failed: .*; is the server running\?"):
        await models_at("http://127.0.0.1:9", token=None)
    with in_thread(OpenAIFake(lambda body: "2").app) as url:
        assert [card["id"] for card in await models_at(url, token=None)] == ["small", "large"]
        with pytest.raises(AddressError, match=r"HTTP 404"):
            await models_at(f"{url}/other", token=None)
