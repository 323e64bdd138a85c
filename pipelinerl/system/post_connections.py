"""`FanoutClient`: sends the same small request to many peers concurrently, and receives small responses.

HTTP libraries build each request from scratch. Here requests are prepared as bytes: a request's head is cached for each
peer, and all peers share its body.

A connection carries one call at a time, and is reused only after a complete response. Every call has a deadline. A
response has at most `MOST_ANSWER_BYTES`, including its head. A peer may close an idle connection just as it is reused.
A request on a reused connection that fails before any byte of the response is therefore repeated once on a new
connection. A request may thus reach its peer twice, so it must be idempotent, like weight updates and polls. Streamed
requests are never repeated; their responses may have any length and are read incrementally, with back-pressure.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| a connection | the peer accepts or refuses | `CONNECT_S`, or the call's own deadline |
| an answer | the peer answers or leaves | the call's deadline |
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any, Final, final
from urllib.parse import urlsplit

import httptools

#: Maximum size of a response in bytes: several times the size of any useful error message.
MOST_ANSWER_BYTES: Final = 2**20
_SAY_WHERE_IT_ENDS: Final = frozenset({b"content-length", b"transfer-encoding"})


@final
class _Peer:
    """The server at one base URL, with its idle connections and cached request heads."""

    def __init__(self, url: str) -> None:
        """Parse the URL. Raises `ValueError` if it is not the URL of a server."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected http://host:port, got {url[:80]!r}")
        self.secure = parts.scheme == "https"
        self.host, self.port = parts.hostname, parts.port or (443 if self.secure else 80)
        self._name, self._prefix = parts.netloc.rpartition("@")[2], parts.path.rstrip("/")
        if not (self._name + parts.path).isascii() or any(each <= " " for each in self._name + parts.path):
            raise ValueError(f"expected an ASCII address without spaces, got {url[:80]!r}")
        self.idle: list[_Line] = []
        self._heads: dict[tuple[str, str], bytes] = {}

    def request(self, path: str, headers: str, body: bytes | None) -> bytes:
        """Return the bytes of a POST of `body`, or of a GET if `body` is None; heads are cached by method and path."""
        method = "GET" if body is None else "POST"
        head = self._heads.get((method, path))
        if head is None:
            line = f"{method} {self._prefix}{path} HTTP/1.1\r\nhost: {self._name}\r\n{headers}"
            head = self._heads[method, path] = line.encode()
        return head + b"\r\n" if body is None else b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)


@final
class FanoutClient:
    """An HTTP client for small requests to many peers, in one event loop; call `close` in the same loop."""

    def __init__(self, *, headers: dict[str, str], keep_alive_s: float, connect_s: float) -> None:
        """Create a client. Idle connections are reused for `keep_alive_s`, which must be below the server's limit."""
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._keep_alive_s = keep_alive_s
        self._connect_s = connect_s
        self._peers: dict[str, _Peer] = {}
        self._lines: set[_Line] = set()
        self._is_closed = False

    async def post(self, url: str, path: str, body: bytes, *, timeout_s: float) -> tuple[int, bytes]:
        """Send `body` to `path` below `url`, and return status and body of the response.

        Raises:
            ConnectionError: the connection cannot be made, or ends before the response does.
            TimeoutError: no complete response within `timeout_s`.
            ValueError: `url` is invalid.
        """
        return await self._exchange(url, path, body, timeout_s)

    async def get(self, url: str, path: str, *, timeout_s: float) -> tuple[int, bytes]:
        """Request `path` below `url`, and return status and body; raises like `post`."""
        return await self._exchange(url, path, None, timeout_s)

    async def stream(
        self, url: str, path: str, body: bytes | None, *, timeout_s: float
    ) -> AsyncGenerator[tuple[int, bytes]]:
        """Send a POST with `body`, or a GET if `body` is None; yield the status with each part of the response's body.

        The last part may be empty. Raises like `post`, after yielding everything received. Closing the generator
        abandons the rest.
        """
        peer, due = self._peer(url), (now := time.monotonic()) + timeout_s
        line = self._kept(peer, now) or await self._connected(peer, due)
        answer = line.begin(peer.request(path, self._headers, body), streams=True)
        alarm = answer.get_loop().call_later(max(due - time.monotonic(), 0.0), line.fail, TimeoutError())
        try:
            while not answer.done():
                if piece := line.taken():
                    yield piece
                else:
                    await line.grown()
            yield answer.result()
        finally:
            alarm.cancel()
            if not answer.cancel():
                answer.exception()  # mark the exception as retrieved, so that asyncio does not log it
            self._give_back(line, peer)

    def _peer(self, url: str) -> _Peer:
        peer = self._peers.get(url)
        if peer is None:
            peer = self._peers[url] = _Peer(url)
        return peer

    async def _exchange(self, url: str, path: str, body: bytes | None, timeout_s: float) -> tuple[int, bytes]:
        peer, due = self._peer(url), (now := time.monotonic()) + timeout_s
        request = peer.request(path, self._headers, body)
        if (kept := self._kept(peer, now)) is not None:
            try:
                return await self._exchange_on(kept, peer, request, timeout_s)
            except _NotAnswered:
                if self._is_closed:
                    raise
        line = await self._connected(peer, due)
        return await self._exchange_on(line, peer, request, due - time.monotonic())

    async def _exchange_on(self, line: _Line, peer: _Peer, request: bytes, timeout_s: float) -> tuple[int, bytes]:
        answer = line.begin(request)
        due = answer.get_loop().call_later(max(timeout_s, 0.0), line.fail, TimeoutError())
        try:
            return await answer
        finally:
            due.cancel()
            self._give_back(line, peer)

    def _give_back(self, line: _Line, peer: _Peer) -> None:
        if line.is_free:
            peer.idle.append(line)
        else:
            line.drop()

    async def close(self) -> None:
        """Close all connections, and wait until their sockets are closed."""
        self._is_closed = True
        for line in (lines := list(self._lines)):
            line.drop()
        async with asyncio.timeout(self._connect_s):
            for line in lines:
                await line.closed.wait()

    def _kept(self, peer: _Peer, now: float) -> _Line | None:
        while peer.idle:
            line = peer.idle.pop()
            if line.is_free and now - line.since < self._keep_alive_s:
                return line
            line.drop()
        return None

    async def _connected(self, peer: _Peer, due: float) -> _Line:
        loop, line, secure = asyncio.get_running_loop(), _Line(self._lines), True if peer.secure else None
        protocol: Any = line
        try:
            async with asyncio.timeout(min(self._connect_s, due - time.monotonic())):
                await loop.create_connection(lambda: protocol, peer.host, peer.port, ssl=secure)
        except TimeoutError:
            raise ConnectionError(f"timed out connecting to {peer.host}:{peer.port}") from None
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConnectionError(f"cannot connect to {peer.host}:{peer.port}: {reason}") from error
        return line


@final
class _NotAnswered(ConnectionError):
    """The connection ended before the first byte of a response."""


@final
class _Line:
    """One connection: an `asyncio.Protocol` with its parser's callbacks. It is in the set `lines` while it is open."""

    def __init__(self, lines: set[_Line]) -> None:
        self._lines = lines
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._parser: Any = None
        self._body = b""
        self._num_bytes = 0
        self._has_end = self._to_the_end = self._has_begun = False
        self._streams = self._is_paused = False
        self._grown: asyncio.Future[None] | None = None
        self.since = 0.0
        self.closed = asyncio.Event()

    def begin(self, request: bytes, *, streams: bool = False) -> asyncio.Future[tuple[int, bytes]]:
        """Send a request; return the future of its response, which raises `ConnectionError` if the connection is lost.

        With `streams`, parts of the body can be read by `taken` before the end; the result holds only the rest.
        """
        answer = self._answer = asyncio.get_running_loop().create_future()
        self._parser, self._body, self._num_bytes = httptools.HttpResponseParser(self), b"", 0
        self._has_end = self._to_the_end = self._has_begun = False
        self._streams = streams
        if self._transport is None:
            self.fail(_NotAnswered("the connection was closed"))
        else:
            self._transport.write(request)
        return answer

    def taken(self) -> tuple[int, bytes] | None:
        """Return the status and the part of the body received since the last call; None if nothing was received."""
        if not self._body:
            return None
        piece, self._body, self._num_bytes = self._body, b"", 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return self._parser.get_status_code(), piece

    async def grown(self) -> None:
        """Wait until `taken` has more to return, or the response has ended."""
        self._grown = asyncio.get_running_loop().create_future()
        await self._grown

    @property
    def is_free(self) -> bool:
        return self._transport is not None and self._answer is None and not self._transport.is_closing()

    def drop(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)
            self._tell()

    # The event loop calls the following methods of this protocol.

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._lines.add(self)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; bytes that arrive without a request close the connection."""
        if self._answer is None or self._answer.done():
            self.drop()
            return
        self._num_bytes += len(data)
        self._has_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.fail(ConnectionError(f"the answer is not HTTP: {str(error) or type(error).__name__}"))
        if self._num_bytes <= MOST_ANSWER_BYTES:
            return
        if self._streams and self._body and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        else:
            self.fail(ConnectionError(f"the answer is longer than {MOST_ANSWER_BYTES} bytes"))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """Complete a response of unknown length, which ends with the connection; fail any other response."""
        self._transport = None
        self._lines.discard(self)
        self.closed.set()
        if self._to_the_end and error is None and self._answer is not None and not self._answer.done():
            self._answer.set_result((self._parser.get_status_code(), self._body))
            self._tell()
        kind = ConnectionError if self._has_begun else _NotAnswered
        self.fail(kind(f"the connection ended before the answer{f': {error}' if error else ''}"))

    def pause_writing(self) -> None:
        """Do nothing if the peer reads slowly: at most one request is buffered."""

    def resume_writing(self) -> None:
        """Do nothing."""

    # The HTTP parser calls the following methods.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_end = self._has_end or name.lower() in _SAY_WHERE_IT_ENDS

    def on_headers_complete(self) -> None:
        self._to_the_end, self._has_end = not self._has_end, False

    def on_body(self, body: bytes) -> None:
        self._body += body
        if self._streams:
            self._tell()

    def on_message_complete(self) -> None:
        """Complete the response; skip informational responses (1xx)."""
        status, reusable = self._parser.get_status_code(), self._parser.should_keep_alive()
        if status < 200:
            self._body = b""
            return
        answer, self.since = self._answer, time.monotonic()
        if reusable:
            self._answer = None
        if answer is not None and not answer.done():
            answer.set_result((status, self._body))
            self._tell()

    def _tell(self) -> None:
        if self._grown is not None and not self._grown.done():
            self._grown.set_result(None)
