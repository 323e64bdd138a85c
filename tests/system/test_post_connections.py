"""Tests of the HTTP client `FanoutClient`: incomplete responses are errors; connections are only reused if safe."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pipelinerl.system import http_client
from pipelinerl.system.post_connections import MOST_ANSWER_BYTES, FanoutClient
from tests.patience import PATIENCE_S

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


class Peer:
    """A server that answers the n-th request with the n-th of `answers`.

    If the answer is None, the server closes the connection; if the answer is empty, the server never answers.
    """

    def __init__(self, *answers: bytes | None, in_pieces: bool = False) -> None:
        self._answers = list(answers)
        self._in_pieces = in_pieces
        self.received: list[bytes] = []
        self.connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it closes."""
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = int((re.findall(rb"content-length: (\d+)", head.lower()) or [0])[0])
                self.received.append(head + await reader.readexactly(size))
                answer = self._answers.pop(0)
                if answer is None:
                    break
                for piece in _pieces(answer) if self._in_pieces else [answer]:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                if b"connection: close" in answer:
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def _pieces(answer: bytes) -> list[bytes]:
    return [answer[at : at + 1] for at in range(len(answer))]


@asynccontextmanager
async def talking(peer: Peer, *, keep_alive_s: float = 60.0) -> AsyncIterator[tuple[FanoutClient, str]]:
    server = await asyncio.start_server(peer.serve, "127.0.0.1", 0)
    posts = http_client.post_connections(token="secret", keep_alive_s=keep_alive_s, headers={"x-kind": "test"})
    try:
        yield posts, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        await posts.close()
        server.close()
        await server.wait_closed()


async def test_get_request_of_the_http_client_has_no_body() -> None:
    peer = Peer(OK, OK)
    async with talking(peer) as (posts, url):
        assert await posts.get(url, "/metrics", timeout_s=PATIENCE_S) == (200, b"hi")
        assert await _post(posts, url) == (200, b"hi")
    name = url.removeprefix("http://")
    expected = f"GET /metrics HTTP/1.1\r\nhost: {name}\r\nx-kind: test\r\nauthorization: Bearer secret\r\n\r\n"
    assert (peer.received[0].decode(), peer.connections) == (expected, 1)


async def _post(posts: FanoutClient, url: str, *, timeout_s: float = PATIENCE_S) -> tuple[int, bytes]:
    return await posts.post(url, "/do", b'{"a":1}', timeout_s=timeout_s)


async def test_http_request_arrives_complete_and_its_connection_is_reused() -> None:
    peer = Peer(OK, b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 409 Conflict\r\ncontent-length: 0\r\n\r\n")
    async with talking(peer) as (posts, url):
        assert await _post(posts, url + "/below/") == (200, b"hi")
        assert await _post(posts, url + "/below/") == (409, b"")
    name = url.removeprefix("http://")
    assert peer.received[0].decode() == (
        f"POST /below/do HTTP/1.1\r\nhost: {name}\r\nx-kind: test\r\nauthorization: Bearer secret\r\n"
        'content-length: 7\r\n\r\n{"a":1}'
    )
    assert peer.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nh\r\n1\r\ni\r\n0\r\n\r\n",
    ],
    ids=["content length", "end of connection", "chunked"],
)
@pytest.mark.parametrize("in_pieces", [False, True], ids=["at once", "byte by byte"])
async def test_http_client_supports_every_way_to_mark_the_end_of_a_response(answer: bytes, in_pieces: bool) -> None:
    async with talking(Peer(answer, OK, in_pieces=in_pieces)) as (posts, url):
        assert await _post(posts, url) == (200, b"hi")
        assert await _post(posts, url) == (200, b"hi")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "ended before the answer"),
        (b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 9\r\n\r\nhi", "ended before the answer"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "the answer is not HTTP"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (MOST_ANSWER_BYTES + 1), "longer than"),
        (b"HTTP/1.1 200 OK\r\nx-endless: " + b"x" * (MOST_ANSWER_BYTES + 1), "longer than"),
    ],
    ids=["no response", "body cut short", "not HTTP", "body too long", "endless headers"],
)
async def test_incomplete_http_response_raises_and_its_connection_is_not_reused(
    answer: bytes | None, words: str
) -> None:
    peer = Peer(answer, OK)
    async with talking(peer) as (posts, url):
        with pytest.raises(ConnectionError, match=words):
            await _post(posts, url)
        assert await _post(posts, url) == (200, b"hi")
    assert peer.connections == 2


async def test_http_request_is_repeated_if_the_server_has_closed_the_reused_connection() -> None:
    peer = Peer(OK, None, OK)
    async with talking(peer) as (posts, url):
        assert [await _post(posts, url), await _post(posts, url)] == [(200, b"hi")] * 2
    assert (peer.connections, peer.received[1]) == (2, peer.received[2])


@pytest.mark.parametrize(
    ("answers", "request_count"),
    [((OK, None, None), 3), ((OK, b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 9\r\n\r\nhi"), 2)],
    ids=["closed after the retry", "response has begun"],
)
async def test_http_request_is_repeated_only_once_and_not_if_its_response_has_begun(
    answers: tuple[bytes | None, ...], request_count: int
) -> None:
    peer = Peer(*answers)
    async with talking(peer) as (posts, url):
        assert await _post(posts, url) == (200, b"hi")
        with pytest.raises(ConnectionError, match="ended before the answer"):
            await _post(posts, url)
    assert len(peer.received) == request_count


async def test_streamed_http_response_is_read_incrementally_and_its_connection_is_reused() -> None:
    pieces = [b"x" * MOST_ANSWER_BYTES, b"y" * MOST_ANSWER_BYTES, b"z"]
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (*pieces, b""))
    peer = Peer(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body, OK)
    async with talking(peer) as (posts, url):
        came = []
        async for status, piece in posts.stream(url, "/do", b"{}", timeout_s=PATIENCE_S):
            assert status == 200
            came.append(piece)
            await asyncio.sleep(0.01)  # time for the server to fill the connection's buffers, so that it must wait
        assert (b"".join(came), max(map(len, came)) < 2 * MOST_ANSWER_BYTES) == (b"".join(pieces), True)
        assert await _post(posts, url) == (200, b"hi")
    assert peer.connections == 1


@pytest.mark.parametrize("ends", [b"connection: close\r\n", b""], ids=["connection closed", "peer silent"])
async def test_received_part_of_an_interrupted_streamed_response_is_yielded(ends: bytes) -> None:
    peer = Peer(b"HTTP/1.1 200 OK\r\n" + ends + b"content-length: 9\r\n\r\nhi", OK)
    async with talking(peer) as (posts, url):
        stream = posts.stream(url, "/do", None, timeout_s=0.1)
        assert await anext(stream) == (200, b"hi")
        with pytest.raises(ConnectionError if ends else TimeoutError):
            await anext(stream)
        assert await _post(posts, url) == (200, b"hi")
    assert peer.connections == 2


async def test_connection_of_a_streamed_response_that_was_closed_early_is_not_reused() -> None:
    peer = Peer(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhi", OK)
    async with talking(peer) as (posts, url):
        stream = posts.stream(url, "/do", None, timeout_s=PATIENCE_S)
        assert await anext(stream) == (200, b"hi")
        await stream.aclose()
        assert await _post(posts, url) == (200, b"hi")
    assert peer.connections == 2


async def test_closed_http_client_opens_no_further_connection() -> None:
    peer = Peer(OK, b"")
    async with talking(peer) as (posts, url):
        assert await _post(posts, url) == (200, b"hi")
        call = asyncio.create_task(_post(posts, url))
        async with asyncio.timeout(PATIENCE_S):
            while len(peer.received) < 2:
                await asyncio.sleep(0.005)
        await posts.close()
        with pytest.raises(ConnectionError, match="ended before the answer"):
            await call
    assert peer.connections == 1


async def test_http_request_times_out_and_its_late_response_is_not_taken_for_another_requests() -> None:
    peer = Peer(b"", OK)
    async with talking(peer) as (posts, url):
        with pytest.raises(TimeoutError):
            await _post(posts, url, timeout_s=0.05)
        assert await _post(posts, url) == (200, b"hi")
    assert peer.connections == 2


async def test_connection_of_a_cancelled_http_request_is_not_reused() -> None:
    peer = Peer(b"", OK)
    async with talking(peer) as (posts, url):
        call = asyncio.create_task(_post(posts, url))
        async with asyncio.timeout(PATIENCE_S):
            while not peer.received:
                await asyncio.sleep(0.005)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert await _post(posts, url) == (200, b"hi")
    assert peer.connections == 2


async def test_http_connection_that_was_idle_for_too_long_is_not_reused() -> None:
    peer = Peer(OK, OK)
    async with talking(peer, keep_alive_s=0.0) as (posts, url):
        assert [await _post(posts, url), await _post(posts, url)] == [(200, b"hi")] * 2
    assert peer.connections == 2


async def test_concurrent_requests_to_one_server_use_separate_connections() -> None:
    peer = Peer(OK, OK, OK)
    async with talking(peer) as (posts, url):
        assert await asyncio.gather(*(_post(posts, url) for _ in range(3))) == [(200, b"hi")] * 3
    assert peer.connections == 3


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://127.0.0.1", "http://", "http://a b"])
async def test_http_client_rejects_an_invalid_url(url: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        await _post(http_client.post_connections(token=None, keep_alive_s=1.0), url)


async def test_error_names_the_server_that_cannot_be_reached() -> None:
    posts = http_client.post_connections(token=None, keep_alive_s=1.0)
    async with talking(Peer()) as (_, url):
        pass
    with pytest.raises(ConnectionError, match=url.removeprefix("http://")):
        await _post(posts, url)
