"""`LimitedConnection`: one HTTP/1.1 connection with bounds on what a stranger can make it hold or wait for.

It stands between the transport and uvicorn's own protocol, which bounds neither: a header without an end is kept whole
and copied with each read, and a connection that sends none is never closed. Promises, before any token is looked at:

- a request's head (its line and headers, or what follows a body that is no body) takes `MAX_HEAD_BYTES` at most, and
  one more read: 431. What came after a chunked body is dropped: no trailer becomes a header.
- a head is whole `HEAD_TIMEOUT_S` after the connection was made, or after its first byte: 408.
- the rest of a body that nobody reads is taken for `HEAD_TIMEOUT_S`; then the connection is closed.
- a process has `max_connections()` of them at most: 503.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| the first byte, the rest of a head | the client sends or leaves | `HEAD_TIMEOUT_S` |
| another request | the client sends or leaves | `KEEP_ALIVE_S` |
| a body that the application reads | the client sends or leaves | the application's own limit |
"""

from __future__ import annotations

import asyncio
import json
import resource
from enum import Enum, auto
from http import HTTPStatus
from typing import Any, Final, final

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

#: Several times what any client of ours sends; most servers take 8 to 32 KiB.
MAX_HEAD_BYTES: Final = 32 * 2**10
HEAD_TIMEOUT_S: Final = 20.0
#: Longer than a client keeps an idle connection, so that it is the client that closes it and no request meets a close.
KEEP_ALIVE_S: Final = 75
MAX_CONNECTIONS: Final = 4096
#: From this size on what is written is sent at once: to be sent apart costs it nothing.
_LARGE_WRITE: Final = 2**14


def max_connections() -> int:
    """How many connections one process serves: at most half of the files that it may open."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, files // 2))


class _Stage(Enum):
    """Where in a request the bytes are that come next."""

    IDLE = auto()
    HEAD = auto()
    BODY = auto()


@final
class LimitedConnection:
    """An `asyncio.Protocol` for uvicorn's `http` option; the arguments are uvicorn's.

    The parser's callbacks come here first, since nothing else tells where a head ends.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._http = HttpToolsProtocol(config, server_state, app_state, _loop)
        self._http.parser = httptools.HttpRequestParser(self)
        self._http.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self._stage = _Stage.IDLE
        self._is_served = False
        self._overhead = 0
        """Bytes since the last of a body, or of a request."""
        self._opens = False
        """Did the bytes that are being parsed begin between two requests, and none has begun since?"""
        self._timer: asyncio.TimerHandle | None = None

    # What the transport calls.

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Serve the connection, unless there are too many."""
        joined: Any = _JoinedWrites(transport)
        if len(self._http.connections) >= max_connections():
            joined.write(_answer(503, "too_many_connections", "this server has all the connections that it serves"))
            joined.close()
            return
        self._is_served = True
        self._http.connection_made(joined)
        self._arm()

    def data_received(self, data: bytes) -> None:
        """Parse what has come; of a head, no more at once than it may have."""
        while data and self._is_served and not self._http.transport.is_closing():
            taken = len(data) if self._stage is _Stage.BODY else MAX_HEAD_BYTES
            part, data = data[:taken], data[taken:]
            self._overhead += len(part)
            self._opens = self._stage is _Stage.IDLE
            self._http.data_received(part)
            if self._overhead > MAX_HEAD_BYTES:
                self._refuse(431, "headers_too_large", f"the headers must have at most {MAX_HEAD_BYTES} bytes")
        self._watch()

    def eof_received(self) -> None:
        """The client sends no more."""
        self._http.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        """Forget it."""
        self._disarm()
        if self._is_served:
            self._http.connection_lost(error)

    def pause_writing(self) -> None:
        """The client reads too slowly."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._http.resume_writing()

    # What the parser calls.

    def on_message_begin(self) -> None:
        """A request's first byte."""
        if not self._opens:  # what came before it was another's
            self._overhead = 0
        self._stage, self._opens = _Stage.HEAD, False
        self._http.on_message_begin()

    def on_url(self, url: bytes) -> None:
        """A piece of the request's target."""
        self._http.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header; a trailer is none."""
        if self._stage is _Stage.HEAD:
            self._http.on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._stage, self._overhead = _Stage.BODY, 0
        self._http.on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._overhead = 0
        self._http.on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._stage, self._overhead = _Stage.IDLE, 0
        self._http.on_message_complete()

    # Deadlines.

    @property
    def _is_answered(self) -> bool:
        """Is no request at work?"""
        cycle: RequestResponseCycle | None = self._http.cycle
        return cycle is None or cycle.response_complete

    def _watch(self) -> None:
        """Have a deadline exactly while the client is waited for and neither uvicorn nor the application has one."""
        unwatched = self._is_answered and self._http.timeout_keep_alive_task is None
        if self._stage is not _Stage.HEAD and not unwatched:
            self._disarm()
        elif self._timer is None:
            self._arm()

    def _arm(self) -> None:
        cycle: RequestResponseCycle | None = self._http.cycle
        begun = cycle is not None  # a connection that never sent anything is not worth keeping alive
        seconds = KEEP_ALIVE_S if begun and self._stage is _Stage.IDLE else HEAD_TIMEOUT_S
        self._timer = self._http.loop.call_later(seconds, self._late)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        self._timer = None
        if self._http.transport.is_closing():
            return
        if not self._is_answered:  # the next request comes slowly, while the one before it is at work
            self._arm()
        elif self._stage is _Stage.HEAD:
            self._refuse(408, "headers_too_slow", f"the headers must come within {HEAD_TIMEOUT_S:g} s")
        else:
            self._http.transport.close()

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer, if no other answer has begun, and close."""
        if self._is_answered or not self._http.cycle.response_started:
            self._http.transport.write(_answer(status, code, message))
        self._http.transport.close()


@final
class _JoinedWrites:
    """A transport whose small writes wait for the next one, or for the event loop's next turn, whichever comes first.

    uvicorn writes the head of an answer and its body one after the other, and uvloop sends each at once: two packets,
    for each of which the client is woken.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held = b""
        self._soon: asyncio.Handle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """See `asyncio.Transport`."""
        return self._transport.is_closing()

    def write(self, data: bytes) -> None:
        """Send `data` after what waits, and both at once; alone it waits, unless it is large."""
        if not data:
            return
        if self._held:
            self._transport.writelines((self._taken(), data))
        elif len(data) >= _LARGE_WRITE:
            self._transport.write(data)
        else:
            self._held, self._soon = data, self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Close the connection once everything is sent."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close it at once."""
        self._taken()
        self._transport.abort()

    def _flush(self) -> None:
        held = self._taken()
        if held and not self._transport.is_closing():
            self._transport.write(held)

    def _taken(self) -> bytes:
        held, self._held = self._held, b""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        return held


def _answer(status: int, code: str, message: str) -> bytes:
    """A refusal as a whole answer, in the shape of all others."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    body = json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
