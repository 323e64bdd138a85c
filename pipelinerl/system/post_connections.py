"""`PostConnections`: the same few bytes to many peers at once, each of whom answers in a few.

A call of an HTTP library makes a request anew for each peer, with everything that requests can have. Here a request is
bytes that are written as they are: the head differs by the peer's name alone, the body not at all. Promises: one call
at a time on each connection; a connection is used again only after a whole answer, and never after a call that was
given up; every call has a deadline; an answer is `MOST_ANSWER_BYTES` at most.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| a connection | the peer accepts or refuses | `CONNECT_S`, or the call's own deadline |
| an answer | the peer answers or leaves | the call's deadline |
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, final
from urllib.parse import urlsplit

import httptools

#: Several times any error that names what is wrong.
MOST_ANSWER_BYTES: Final = 2**20
_SAY_WHERE_IT_ENDS: Final = frozenset({b"content-length", b"transfer-encoding"})


@dataclass(frozen=True, slots=True)
class _Peer:
    host: str
    port: int
    secure: bool
    name: str
    prefix: str


@lru_cache(maxsize=8192)
def _peer(url: str) -> _Peer:
    """Raises ValueError for what is no URL of a server."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"expected http://host:port, got {url[:80]!r}")
    secure = parts.scheme == "https"
    name = parts.netloc.rpartition("@")[2]
    if not (name + parts.path).isascii() or any(character <= " " for character in name + parts.path):
        raise ValueError(f"expected an address in ASCII without blanks, got {url[:80]!r}")
    return _Peer(parts.hostname, parts.port or (443 if secure else 80), secure, name, parts.path.rstrip("/"))


@final
class PostConnections:
    """Used from one event loop; `close` it there."""

    def __init__(self, *, headers: dict[str, str], keep_alive_s: float, connect_s: float) -> None:
        """`headers` are those of every request; an idle connection is used for `keep_alive_s` at most, which is shorter
        than a server keeps it, so that no request meets a close."""
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        self._keep_alive_s = keep_alive_s
        self._connect_s = connect_s
        self._idle: dict[_Peer, list[_Line]] = defaultdict(list)
        self._lines: set[_Line] = set()

    async def post(self, url: str, path: str, body: bytes, *, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of the answer to `body`, sent to `path` below `url`.

        Raises:
            ConnectionError: no connection came about, or it ended before its answer did.
            TimeoutError: no whole answer within `timeout_s`.
            ValueError: `url` is none.
        """
        return await self._asked(url, "POST", path, f"content-length: {len(body)}\r\n", body, timeout_s)

    async def get(self, url: str, path: str, *, timeout_s: float) -> tuple[int, bytes]:
        """Status and body of what is at `path` below `url`; raises as `post`."""
        return await self._asked(url, "GET", path, "", b"", timeout_s)

    async def _asked(
        self, url: str, method: str, path: str, more: str, body: bytes, timeout_s: float
    ) -> tuple[int, bytes]:
        peer, due = _peer(url), time.monotonic() + timeout_s
        line = self._idle_line(peer) or await self._connected(peer, timeout_s)
        head = f"{method} {peer.prefix}{path} HTTP/1.1\r\nhost: {peer.name}\r\n{self._headers}{more}\r\n"
        try:
            answer = await line.ask(head.encode(), body, due - time.monotonic())
        finally:
            if line.is_free:
                self._idle[peer].append(line)
            else:
                line.drop()
        return answer

    async def close(self) -> None:
        """Close every connection, and wait until the sockets are."""
        for line in (lines := list(self._lines)):
            line.drop()
        async with asyncio.timeout(self._connect_s):  # the event loop's next turn
            for line in lines:
                await line.closed.wait()

    def _idle_line(self, peer: _Peer) -> _Line | None:
        idle = self._idle[peer]
        while idle:
            line = idle.pop()
            if line.is_free and time.monotonic() - line.since < self._keep_alive_s:
                return line
            line.drop()
        return None

    async def _connected(self, peer: _Peer, timeout_s: float) -> _Line:
        loop, line, secure = asyncio.get_running_loop(), _Line(self._lines), True if peer.secure else None
        protocol: Any = line
        try:
            async with asyncio.timeout(min(self._connect_s, timeout_s)):
                await loop.create_connection(lambda: protocol, peer.host, peer.port, ssl=secure)
        except TimeoutError:
            raise ConnectionError(f"no connection to {peer.host}:{peer.port} came about in time") from None
        except OSError as error:
            reason = error.strerror or str(error)
            raise ConnectionError(f"cannot connect to {peer.host}:{peer.port}: {reason}") from error
        return line


@final
class _Line:
    """One connection: an `asyncio.Protocol`, and what the parser of its answers calls. It is in `lines` while open."""

    def __init__(self, lines: set[_Line]) -> None:
        self._lines = lines
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._parser: Any = None
        self._body = b""
        self._has_end = self._to_the_end = False
        self.since = 0.0
        self.closed = asyncio.Event()

    async def ask(self, head: bytes, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Send a request and await its answer; see `PostConnections.post`."""
        loop = asyncio.get_running_loop()
        answer = self._answer = loop.create_future()
        if self._transport is None:
            raise ConnectionError("the connection was closed")
        self._begin()
        self._transport.write(head + body)
        due = loop.call_later(max(timeout_s, 0.0), self._fail, TimeoutError())
        try:
            return await answer
        finally:
            due.cancel()

    @property
    def is_free(self) -> bool:
        """May another call be made on it?"""
        return self._transport is not None and self._answer is None and not self._transport.is_closing()

    def drop(self) -> None:
        """Close it."""
        if self._transport is not None:
            self._transport.abort()

    def _begin(self) -> None:
        self._parser, self._body = httptools.HttpResponseParser(self), b""
        self._has_end = self._to_the_end = False

    def _fail(self, error: Exception) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)

    # What the event loop calls.

    def connection_made(self, transport: asyncio.Transport) -> None:
        """It is there."""
        self._transport = transport
        self._lines.add(self)

    def data_received(self, data: bytes) -> None:
        """A piece of an answer; without a question it is nobody's."""
        if self._answer is None or self._answer.done():
            self.drop()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ConnectionError(f"the answer is not HTTP: {str(error) or type(error).__name__}"))
        if len(self._body) > MOST_ANSWER_BYTES:
            self._fail(ConnectionError(f"the answer is longer than {MOST_ANSWER_BYTES} bytes"))

    def eof_received(self) -> bool:
        """The peer sends nothing more: the connection is closed."""
        return False

    def connection_lost(self, error: Exception | None) -> None:
        """It has gone. An answer without a length ends with the connection."""
        self._transport = None
        self._lines.discard(self)
        self.closed.set()
        if self._to_the_end and error is None and self._answer is not None and not self._answer.done():
            self._answer.set_result((self._parser.get_status_code(), self._body))
        self._fail(ConnectionError(f"the connection ended before the answer{f': {error}' if error else ''}"))

    def pause_writing(self) -> None:
        """The peer reads slowly: what was written waits, bounded by the one request that it is."""

    def resume_writing(self) -> None:
        """It has caught up."""

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        self._has_end = self._has_end or name.lower() in _SAY_WHERE_IT_ENDS

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._to_the_end, self._has_end = not self._has_end, False

    def on_body(self, body: bytes) -> None:
        """A piece of the answer's body."""
        self._body += body

    def on_message_complete(self) -> None:
        """The answer is whole; one that only says that another comes is none."""
        status, reusable = self._parser.get_status_code(), self._parser.should_keep_alive()
        if status < 200:
            self._body = b""
            return
        answer, self.since = self._answer, time.monotonic()
        if reusable:
            self._answer = None
        if answer is not None and not answer.done():
            answer.set_result((status, self._body))
