"""The lean client of the control routes: answers and errors as of the general one, on connections that are kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from inference_contract.errors import ContractError, NotPrepared, Unauthorized
from inference_contract.schemas import UpdatePhase, UpdateStatus, WeightUpdateRequest
from pipelinerl.errors import EngineUnreachable
from pipelinerl.weights.broadcast import BroadcastPublisher
from pipelinerl.weights.control_client import ControlClient
from tests.fakes import parameter_server
from tests.fakes.scripted_engine import LAYOUT, application
from tests.fakes.served import in_thread

COMMIT = WeightUpdateRequest(phase=UpdatePhase.COMMIT, version=0, digest="d", timeout_s=0.4)
SERVED = b'{"status":"already_serving","version":0,"epoch":0,"digest":null,"pause_s":0.0,"receive_s":0.0,"num_bytes":0}'


@pytest.fixture
def engine() -> Iterator[str]:
    with in_thread(application(token="secret")) as url:
        yield url


@pytest.fixture
async def client() -> AsyncIterator[ControlClient]:
    made = ControlClient(token="secret")
    yield made
    made.close()


@asynccontextmanager
async def answering(*answers: bytes, ends: bool = False) -> AsyncIterator[tuple[str, list[int]]]:
    """A server that answers so, whatever it is asked, one answer per request; and how many connections it has seen."""
    left, connections = list(answers), [0]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections[0] += 1
        try:
            while left and await reader.readuntil(b"\r\n\r\n"):
                await reader.readuntil(b"}")
                writer.write(left.pop(0))
                await writer.drain()
                if ends:
                    break
            if not ends:
                await reader.read()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connections
    finally:
        server.close()


def whole(body: bytes, status: bytes = b"200 OK", more: bytes = b"") -> bytes:
    return b"HTTP/1.1 " + status + b"\r\ncontent-length: " + str(len(body)).encode() + b"\r\n" + more + b"\r\n" + body


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 8.0
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_a_publisher_needs_no_other_client(engine: str, client: ControlClient) -> None:
    publisher = BroadcastPublisher(client)
    for version in (1, 2):
        publication = parameter_server.publication(version, (engine,), layout=LAYOUT, timeout_s=30.0)
        report = await publisher.publish(publication)
        assert report.failed == {} and report.digest == parameter_server.digest(version, LAYOUT)
    await publisher.close()
    assert len(client._idle[engine]) == 1, "all went over one connection"


async def test_refusals_come_back_as_the_class_that_was_raised(engine: str, client: ControlClient) -> None:
    with pytest.raises(NotPrepared, match="was not prepared here"):
        await client.request_weight_update(engine, COMMIT.model_copy(update={"version": 7}))
    assert (await client.request_weight_update(engine, COMMIT)).status is UpdateStatus.ALREADY_SERVING
    stranger = ControlClient(token="wrong")
    with pytest.raises(Unauthorized):
        await stranger.request_weight_update(engine, COMMIT)
    stranger.close()


async def test_calls_at_once_have_connections_of_their_own(engine: str, client: ControlClient) -> None:
    answers = await asyncio.gather(*(client.request_weight_update(engine, COMMIT) for _ in range(5)))
    assert {answer.status for answer in answers} == {UpdateStatus.ALREADY_SERVING}
    assert 1 <= len(client._idle[engine]) <= 5


async def test_an_engine_that_is_gone_or_silent_is_named_in_time(client: ControlClient) -> None:
    with pytest.raises(
        EngineUnreachable, match=r"POST http://127\.0\.0\.1:9/request_weight_update failed: .*running\?"
    ):
        await client.request_weight_update("http://127.0.0.1:9", COMMIT)
    async with answering() as (url, _):
        began = time.monotonic()
        with pytest.raises(EngineUnreachable, match=r"had no answer within 1\.4 s"):
            await client.request_weight_update(url, COMMIT)
        assert time.monotonic() - began < 6 and url not in client._idle, "a connection that owes an answer is not kept"


async def test_a_connection_that_was_closed_while_idle_is_made_anew(client: ControlClient) -> None:
    async with answering(whole(SERVED), whole(SERVED), ends=True) as (url, connections):
        for _ in range(2):
            await client.request_weight_update(url, COMMIT)
            await until(lambda: not client._idle[url] or not client._idle[url][0].is_open)
        assert connections == [2]
        with pytest.raises(EngineUnreachable, match="closed the connection"):
            await client.request_weight_update(url, COMMIT)


@pytest.mark.parametrize(
    "answer",
    [
        whole(SERVED),
        whole(SERVED, more=b"connection: close\r\n"),
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (SERVED[:9], SERVED[9:]))
        + b"0\r\n\r\n",
    ],
    ids=["length", "close", "chunked"],
)
async def test_every_form_of_answer_is_read(client: ControlClient, answer: bytes) -> None:
    async with answering(answer, answer) as (url, _):
        assert (await client.request_weight_update(url, COMMIT)).status is UpdateStatus.ALREADY_SERVING
        kept = [connection.is_open for connection in client._idle.get(url, [])]
        assert kept == ([] if b"close" in answer else [True])


@pytest.mark.parametrize(
    ("answer", "raised", "sentence"),
    [
        (b"SSH-2.0-OpenSSH\r\n", EngineUnreachable, "is the engine running"),
        (whole(b"{}"), EngineUnreachable, "must answer with a WeightUpdateResponse"),
        (whole(b"<html>", b"502 Bad Gateway"), ContractError, "got HTTP 502 with another body"),
    ],
    ids=["no HTTP", "no answer of the contract", "a proxy's error"],
)
async def test_what_is_no_answer_of_an_engine_is_said_to_be_none(
    client: ControlClient, answer: bytes, raised: type[Exception], sentence: str
) -> None:
    async with answering(answer) as (url, _):
        with pytest.raises(raised, match=sentence):
            await client.request_weight_update(url, COMMIT)
