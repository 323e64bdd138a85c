"""The client gives back what the engine raised, and names the URL when there is no engine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from inference_contract.errors import InvalidRequest, NotPrepared, Unauthorized, UnknownModel
from inference_contract.schemas import ChatCompletionRequest, ChatMessage, UpdatePhase, WeightUpdateRequest
from pipelinerl.engines.http_client import EngineClient
from pipelinerl.errors import EngineUnreachable
from tests.fakes.scripted_engine import LAYOUT, application
from tests.fakes.served import in_thread


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with in_thread(application(token="t")) as served:
        yield served


@pytest.fixture
async def client() -> AsyncIterator[EngineClient]:
    async with EngineClient(token="t", chat_timeout_s=5.0, state_timeout_s=2.0) as made:
        yield made


def ask(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=[ChatMessage(role="user", content="1 + 2")], max_tokens=4, **fields)


async def test_every_route(client: EngineClient, url: str) -> None:
    completion = await client.chat(url, ask(n=3, seed=1, return_token_ids=True))
    assert len(completion.choices) == 3 and completion.choices[2].token_ids
    assert (await client.health(url)).model_version == 0
    card = (await client.models(url)).data[0]
    assert card.layout == LAYOUT
    assert (await client.metrics(url))["generated_tokens_total"] >= 3


@pytest.mark.parametrize(
    ("request_", "kind"),
    [(ask(model="another"), UnknownModel), (ask(n=1).model_copy(update={"prompt_token_ids": [99]}), InvalidRequest)],
)
async def test_errors_keep_their_class(
    client: EngineClient, url: str, request_: ChatCompletionRequest, kind: type[Exception]
) -> None:
    with pytest.raises(kind):
        await client.chat(url, request_)


async def test_update_errors_keep_their_class_and_param(client: EngineClient, url: str) -> None:
    request = WeightUpdateRequest(phase=UpdatePhase.PREPARE, version=1, group="g", generation=1, layout=LAYOUT)
    with pytest.raises(NotPrepared) as refused:
        await client.request_weight_update(url, request)
    assert refused.value.param == "group"


async def test_a_wrong_token(url: str) -> None:
    async with EngineClient(token="wrong") as stranger:
        assert (await stranger.health(url)).model_version == 0
        with pytest.raises(Unauthorized):
            await stranger.models(url)


async def test_nobody_listens(client: EngineClient) -> None:
    with pytest.raises(
        EngineUnreachable, match=r"^GET http://127\.0\.0\.1:9/health failed: .*is the engine running\?$"
    ):
        await client.health("http://127.0.0.1:9")


async def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        async with EngineClient(state_timeout_s=0.2) as client:
            with pytest.raises(EngineUnreachable, match=r"had no answer within 0\.2 s \(ReadTimeout\)"):
                await client.health(url)


async def test_something_else_answers() -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(reply, "127.0.0.1", 0) as server, EngineClient() as client:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(EngineUnreachable, match="must answer with a Health; state: Field required"):
            await client.health(url)
