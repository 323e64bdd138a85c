"""The engine client reuses connections only if that is safe, and repeats only requests that are idempotent.

It raises the engine's own errors, and names the URL if no engine answers.
"""

import asyncio
import re
from contextlib import asynccontextmanager, nullcontext

import pytest

from inference_contract.errors import ContractError, NotPrepared
from inference_contract.schemas import ChatCompletionRequest, ChatMessage
from inference_contract.weights import UpdatePhase, UpdateStatus, WeightUpdateRequest
from pipelinerl.engines.http import client as engine_client
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.errors import EngineUnreachable
from tests.fakes.raw_server import raw_server, response, sending
from tests.fakes.scripted_engine import LAYOUT, application
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S

HEALTH = b'{"state":"ready","epoch":0,"model_version":3}'
UPDATE = WeightUpdateRequest(phase=UpdatePhase.PREPARE, version=1, group="g", generation=1, layout=LAYOUT)
CHAT = ChatCompletionRequest(messages=[ChatMessage(role="user", content="1 + 2")], max_tokens=4)
CHUNK = b'{"id":"c","created":0,"model":"m","choices":[],"model_version":0}'

OK = response(HEALTH)
UPDATED = response(b'{"epoch":0,"version":1,"status":"%s"}' % UpdateStatus.PREPARED.value.encode())
CUT_SHORT = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 99\r\n\r\n{"


class Peer:
    """A server that answers the n-th request with the n-th of `answers`.

    If the answer is None, the server closes the connection; if the answer is empty, the server never answers.
    """

    def __init__(self, *answers):
        self._answers = list(answers)
        self.received = []
        self.connections = 0

    async def serve(self, reader, writer):
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = int((re.findall(rb"content-length: (\d+)", head.lower()) or [0])[0])
                self.received.append(head + await reader.readexactly(size))
                answer = self._answers.pop(0)
                if answer is None:
                    break
                writer.write(answer)
                await writer.drain()
                if b"connection: close" in answer:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def talking(*answers, timeout_s=PATIENCE_S):
    peer = Peer(*answers)
    async with (
        await asyncio.start_server(peer.serve, "127.0.0.1", 0) as server,
        EngineClient(token="secret", chat_timeout_s=timeout_s, state_timeout_s=timeout_s) as client,
    ):
        yield peer, client, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_requests_to_an_engine_share_a_connection_and_carry_its_token():
    async with talking(OK, UPDATED) as (peer, client, url):
        assert (await client.health(url)).model_version == 3
        assert (await client.request_weight_update(url, UPDATE)).version == 1
    assert peer.connections == 1
    first, second = (request.lower() for request in peer.received)
    assert first.startswith(b"get /health http/1.1\r\n") and b"authorization: bearer secret\r\n" in first
    assert second.startswith(b"post /request_weight_update") and b"content-type: application/json\r\n" in second
    assert WeightUpdateRequest.model_validate_json(peer.received[1].partition(b"\r\n\r\n")[2]) == UPDATE


async def test_concurrent_requests_to_one_engine_use_separate_connections():
    async with talking(OK, OK, OK) as (peer, client, url):
        await asyncio.gather(*(client.health(url) for _ in range(3)))
    assert peer.connections == 3


@pytest.mark.parametrize(
    "answer",
    [None, CUT_SHORT, b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\nx-endless: " + b"x" * 2**20],
    ids=["no response", "body cut short", "not HTTP", "endless headers"],
)
async def test_incomplete_response_raises_and_its_connection_is_not_reused(answer):
    async with talking(answer, OK) as (peer, client, url):
        with pytest.raises(EngineUnreachable):
            await client.chat(url, CHAT)
        assert (await client.health(url)).model_version == 3
    assert peer.connections == 2


async def test_response_that_is_too_large_to_be_an_engines_raises():
    endless = b"HTTP/1.1 200 OK\r\n\r\n" + b" " * (engine_client._MOST_BYTES + 1)
    async with talking(endless) as (_, client, url):
        with pytest.raises(EngineUnreachable, match="sends more than 1048576 bytes"):
            await client.health(url)


async def update(client, url):
    assert (await client.request_weight_update(url, UPDATE)).version == 1


async def chat(client, url):
    await client.chat(url, CHAT)


@pytest.mark.parametrize(
    ("call", "answers", "fails", "request_count"),
    [
        (update, (None, UPDATED), nullcontext(), 3),
        (update, (None, None), pytest.raises(EngineUnreachable), 3),
        (update, (CUT_SHORT,), pytest.raises(EngineUnreachable), 2),
        (chat, (None,), pytest.raises(EngineUnreachable), 2),
    ],
    ids=["update, closed", "update, closed again", "update, response has begun", "completion"],
)
async def test_only_a_weight_update_is_repeated_and_only_once_if_the_engine_has_closed_the_reused_connection(
    call, answers, fails, request_count
):
    async with talking(OK, *answers) as (peer, client, url):
        await client.health(url)
        with fails:
            await call(client, url)
    assert len(peer.received) == request_count and peer.received[1] == peer.received[-1]


async def health(client, url):
    await client.health(url)


async def stream(client, url):
    async for _ in client.stream(url, CHAT):
        pass


@pytest.mark.parametrize("call", [health, stream])
@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi"], ids=["silent", "partial"])
async def test_timed_out_request_does_not_leave_its_late_response_to_another_request(call, answer):
    async with talking(answer, OK, timeout_s=0.1) as (peer, client, url):
        with pytest.raises(EngineUnreachable, match=r"within 0\.1 s"):
            await call(client, url)
        await client.health(url)
    assert peer.connections == 2


@pytest.mark.parametrize("call", [health, stream])
async def test_connection_of_a_cancelled_request_is_not_reused(call):
    async with talking(b"", OK) as (peer, client, url):
        task = asyncio.ensure_future(call(client, url))
        async with asyncio.timeout(PATIENCE_S):
            while not peer.received:
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.health(url)
    assert peer.connections == 2


async def test_streamed_completion_yields_each_event_as_it_arrives_and_frees_its_connection():
    event = b"data: " + CHUNK + b"\n\n"
    async with talking(response(event + event + b"data: [DONE]\n\n"), OK) as (peer, client, url):
        assert [chunk.id async for chunk in client.stream(url, CHAT)] == ["c", "c"]
        await client.health(url)
    assert peer.connections == 1


@pytest.mark.parametrize("breaks", [True, False], ids=["interrupted", "closed early"])
async def test_stream_that_does_not_end_yields_what_has_arrived_and_its_connection_is_not_reused(breaks):
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n" + b"connection: close\r\n" * breaks
    async with talking(head + b"\r\ndata: " + CHUNK + b"\n\n", OK) as (peer, client, url):
        chunks = client.stream(url, CHAT)
        assert (await anext(chunks)).id == "c"
        if breaks:
            with pytest.raises(EngineUnreachable):
                await anext(chunks)
        await chunks.aclose()
        await client.health(url)
    assert peer.connections == 2


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:9",
        "127.0.0.1:80",
        "ftp://127.0.0.1",
        "http://",
        "http://a b",
        "http://a..b",
        f"http://{'h' * 64}",
        "http://a:65536",
    ],
)
async def test_url_that_names_no_server_raises_engine_unreachable(url):
    async with EngineClient() as client:
        with pytest.raises(EngineUnreachable, match="failed"):
            await client.health(url)


async def test_engine_client_raises_the_engines_errors_with_class_and_param():
    with in_thread(application(token="t")) as url:
        async with EngineClient(token="t") as client:
            with pytest.raises(NotPrepared) as refused:
                await client.request_weight_update(url, UPDATE)
    assert refused.value.param == "group"


@pytest.mark.parametrize(
    ("answer", "raised", "sentence"),
    [
        (response(b"{}"), EngineUnreachable, "must answer with a Health; state: Field required"),
        (b"SSH-2.0-OpenSSH\r\n", EngineUnreachable, "is the engine running"),
        (response(b"<html>", status=502), EngineUnreachable, "HTTP 502 without the contract's error"),
        (response(b"Internal Server Error", status=500), EngineUnreachable, "HTTP 500 without"),
        (response(b"", status=302, location="/login"), ContractError, "got HTTP 302 with another body"),
    ],
    ids=["JSON outside the contract", "not HTTP", "proxy error", "internal server error", "redirect to a login page"],
)
async def test_server_that_is_no_engine_gives_an_error_that_says_so(answer, raised, sentence):
    async with raw_server(sending(answer)) as url, EngineClient() as client:
        with pytest.raises(raised, match=sentence):
            await client.health(url)
