"""`LimitedConnection`: one HTTP/1.1 connection with limits on the memory and time that unknown clients can take.

It extends uvicorn's protocol, which keeps an endless header in memory, copies it with each read, and never closes a
connection that sends nothing. These limits apply before authentication:
- A request's head (its first line and headers, or invalid data after a body) with more than `MAX_HEAD_BYTES` is
  answered with status 431; each read is checked. Trailers of a chunked body are dropped and do not become headers.
- A head must be complete within `HEAD_TIMEOUT_S` of the connection's start or the head's first byte; otherwise 408.
- If the application does not read the rest of a body, the connection is closed after `HEAD_TIMEOUT_S`.
- A process has at most `max_connections()` connections; further connections get 503.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| the first byte, the rest of a head | the client sends or leaves | `HEAD_TIMEOUT_S` |
| another request | the client sends or leaves | `KEEP_ALIVE_S` |
| the rest of a body, for the application | the client sends or leaves | the application's own limit |
"""

from __future__ import annotations

import asyncio
import json
import resource
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

#: Maximum size of a request's head: several times the size that our clients send. Most servers accept 8 to 32 KiB.
MAX_HEAD_BYTES: Final = 32 * 2**10
HEAD_TIMEOUT_S: Final = 20.0
#: Seconds for which an idle connection is kept: longer than our clients keep it. The client is then the one that closes
#: it, and no request arrives at a connection that the server is closing.
KEEP_ALIVE_S: Final = 75
MAX_CONNECTIONS: Final = 4096


def max_connections() -> int:
    """Return the connection limit of one process: `MAX_CONNECTIONS`, or half of its open-file limit if that is less."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, files // 2))


class _Stage(Enum):
    IDLE = auto()
    HEAD = auto()
    BODY = auto()


class LimitedConnection(HttpToolsProtocol):
    """An `asyncio.Protocol` for uvicorn's `http` option; the arguments are uvicorn's."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._stage = _Stage.IDLE
        self._overhead = 0
        """Number of bytes since the end of the last body part, or of the last request."""
        self._opens = False
        """True while bytes that were received between two requests are parsed, until a request begins in them."""
        self._timer: asyncio.TimerHandle | None = None

    # The transport calls the following methods.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept the connection, or answer 503 if there are too many."""
        if len(self.connections) >= max_connections():
            transport.write(_answer(503, "too_many_connections", "this server has reached its connection limit"))
            transport.close()
            return
        super().connection_made(transport)
        self._arm()

    @property
    def _is_served(self) -> bool:
        return self in self.connections and not self.transport.is_closing()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; outside a body, at most `MAX_HEAD_BYTES` at a time."""
        while data and self._is_served:
            taken = len(data) if self._stage is _Stage.BODY else MAX_HEAD_BYTES
            part, data = data[:taken], data[taken:]
            self._overhead += len(part)
            self._opens = self._stage is _Stage.IDLE
            super().data_received(part)
            if self._overhead > MAX_HEAD_BYTES:
                self._refuse(431, "headers_too_large", f"the headers must have at most {MAX_HEAD_BYTES} bytes")
        if self._is_served:
            # Run a timer while the server waits for the client, unless uvicorn or the application already has a timer.
            unwatched = self._is_answered and self.timeout_keep_alive_task is None
            if self._stage is not _Stage.HEAD and not unwatched:
                self._disarm()
            elif self._timer is None:
                self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self in self.connections:
            super().connection_lost(exc)

    # The HTTP parser calls the following methods.

    def on_message_begin(self) -> None:
        if not self._opens:  # the bytes received so far are those of the previous request
            self._overhead = 0
        self._stage, self._opens = _Stage.HEAD, False
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._stage is _Stage.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stage, self._overhead = _Stage.BODY, 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stage, self._overhead = _Stage.IDLE, 0
        super().on_message_complete()

    # The following methods enforce deadlines while the server waits for the client.

    @property
    def _is_answered(self) -> bool:
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is None or cycle.response_complete

    def _arm(self) -> None:
        begun = self.cycle is not None  # a new connection without a request gets HEAD_TIMEOUT_S
        seconds = KEEP_ALIVE_S if begun and self._stage is _Stage.IDLE else HEAD_TIMEOUT_S
        self._timer = self.loop.call_later(seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self.transport.is_closing():
            return
        if not self._is_answered:  # the previous request is still being processed, so give the client more time
            self._arm()
        elif self._stage is _Stage.HEAD:
            self._refuse(408, "headers_too_slow", f"the headers must arrive within {HEAD_TIMEOUT_S:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, code: str, message: str) -> None:
        if self._is_answered or not self.cycle.response_started:
            self.transport.write(_answer(status, code, message))
        self.transport.close()


def _answer(status: int, code: str, message: str) -> bytes:
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
