"""The engine's routes over real HTTP: OpenAI's client, error bodies, limits, access tokens, and disconnects."""

import asyncio
import json
import signal
import socket
import time

import httpx
import pytest

from inference_contract.errors import EngineStopped
from inference_contract.schemas import ChatCompletionRequest
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.engines.http.server import create_app
from pipelinerl.system import http_service
from tests.fakes.scripted_engine import MODEL, ScriptedEngine, application
from tests.fakes.served import as_process, in_thread
from tests.patience import PATIENCE_S, SOON_S

TOKEN = "run-token"


@pytest.fixture(scope="module")
def url():
    with in_thread(application(token=TOKEN)) as served:
        yield served


@pytest.fixture
def client(url):
    with httpx.Client(
        base_url=url, headers={"authorization": f"Bearer {TOKEN}"}, trust_env=False, timeout=PATIENCE_S
    ) as made:
        yield made


ASK = {"model": "scripted", "messages": [{"role": "user", "content": "1 + 2"}], "max_tokens": 8}


def test_openai_client_raises_its_own_error_classes(url):
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0, timeout=PATIENCE_S) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**(ASK | {"model": "another"}))
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**ASK, extra_body={"frobnicate": True})
        assert refused.value.param == "frobnicate"
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").models.list()


def test_request_body_over_the_limit_is_rejected(client, monkeypatch):
    monkeypatch.setattr(http_service, "MAX_BODY_BYTES", 1000)
    answer = client.post("/v1/chat/completions", content=b" " * 1001, headers={"content-type": "application/json"})
    assert answer.status_code == 413 and "at most 1000 bytes" in answer.json()["error"]["message"]


def test_request_body_that_never_ends_times_out(url, monkeypatch):
    monkeypatch.setattr(http_service, "BODY_TIMEOUT_S", 0.2)
    address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
    with socket.create_connection(address, timeout=PATIENCE_S) as slow:
        lines = ("POST /v1/chat/completions HTTP/1.1", "host: x", f"authorization: Bearer {TOKEN}", "content-length: 9")
        slow.sendall("\r\n".join([*lines, "content-type: application/json", "", ""]).encode())
        assert b"408" in slow.recv(4096).split(b"\r\n")[0]


class _Broken:
    def __init__(self):
        self._engine = ScriptedEngine()

    def __getattr__(self, name):
        return getattr(self._engine, name)

    async def complete(self, request):
        raise RuntimeError("secret of the inside")

    def model_card(self):
        raise RuntimeError("secret of the inside")


def test_unexpected_error_gives_status_500_and_does_not_reveal_its_message(caplog):
    with in_thread(create_app(_Broken(), token=None)) as served:
        for answer in (
            httpx.get(served + "/v1/models", trust_env=False),
            httpx.post(served + "/v1/chat/completions", json=ASK, trust_env=False),
        ):
            assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
            assert "secret" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_disconnects_cancels_its_request(stream):
    engine = ScriptedEngine(step_s=0.01)
    with in_thread(create_app(engine, token=None)) as served:
        async with httpx.AsyncClient(trust_env=False) as client:
            body = ASK | {"n": 16, "max_tokens": 180, "stream": stream}
            asking = asyncio.create_task(client.post(served + "/v1/chat/completions", json=body))
            await _until(lambda: engine._running == 1)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await _until(lambda: engine._running == 0)


async def _until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def test_error_during_a_stream_is_sent_as_an_event():
    class Failing(_Broken):
        async def stream(self, request):
            async for chunk in self._engine.stream(request):
                yield chunk
                raise EngineStopped("the engine is closing")

    with (
        in_thread(create_app(Failing(), token=None)) as served,
        httpx.stream("POST", served + "/v1/chat/completions", json=ASK | {"stream": True}, trust_env=False) as answer,
    ):
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert json.loads(events[-2])["error"]["code"] == "engine_stopped" and events[-1] == "[DONE]"


def test_small_responses_are_not_delayed_by_nagles_algorithm(client):
    """Head and body are two packets; with Nagle's algorithm, each response would wait 40 ms for a delayed ACK."""
    client.get("/health")

    def took_s():
        began = time.perf_counter()
        client.get("/health")
        return time.perf_counter() - began

    assert any(took_s() < 0.035 for _ in range(200)), "a busy machine lets some be quick"


async def test_closing_server_answers_running_requests_with_engine_stopped():
    request = ChatCompletionRequest.model_validate(ASK | {"n": 16, "max_tokens": 180})
    with as_process("tests.fakes.scripted_engine", "none", "0.1") as (served, process):
        async with EngineClient(chat_timeout_s=PATIENCE_S) as client:
            asking = asyncio.create_task(client.chat(served, request))
            while not (await client.metrics(served))["running_sequences"]:
                await asyncio.sleep(0.005)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(EngineStopped, match="send it to another"):
                await asking
        assert process.wait(SOON_S) in (0, -signal.SIGTERM)
