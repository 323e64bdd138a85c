"""What every HTTP service of ours shares: a bound socket, a gate that asks for the token, an end within seconds.

Promises: everything binds loopback unless told otherwise, and another address is refused without a token; the token is
compared in constant time; `/health` alone needs none; a signal ends the server after what runs was answered or cut.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
import socket
from ipaddress import ip_address
from typing import Any, Final, final

import uvicorn
import uvloop
from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from pipelinerl.errors import AddressError

#: Longer than a client keeps an idle connection, so that it is the client that closes it and no request meets a close.
KEEP_ALIVE_S: Final = 75
GRACE_S: Final = 3
OPEN_PATH: Final = "/health"


def guard(app: FastAPI, *, token: str | None) -> None:
    """Let requests in only with the token; None lets everybody in, and then only loopback is served."""
    app.add_middleware(_Gate, token=token)
    app.state.guarded = token is not None


@final
class _Gate:
    """ASGI middleware around everything."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._may_enter(scope):
            await _refuse(send)
            return
        await self._app(scope, receive, send)

    def _may_enter(self, scope: Scope) -> bool:
        if self._expected is None or scope["path"] == OPEN_PATH:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)


async def _refuse(send: Send) -> None:
    message = "a valid bearer token is required: send the header Authorization: Bearer <token>"
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "unauthorized"}
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, ready to be served on; port 0 takes a free one.

    Raises:
        AddressError: the port is taken, or the address is not of this machine.
    """
    family, _, _, _, address = _resolved(host, port)
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit it. Without it the body of an answer waits for the acknowledgement of its head, which the
    # receiver delays by 40 ms.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        bound.bind(address)
        bound.listen(1024)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressError(f"port {port} on {host} is taken; stop what listens there or choose another") from None
        raise AddressError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    bound.setblocking(False)
    return bound


async def serve_until(app: FastAPI, listener: socket.socket, *, over: asyncio.Future[Any] | None = None) -> None:
    """Serve a guarded application on `listener` until `over` completes, a signal comes or this task is cancelled.

    Raises:
        AddressError: others could reach an application that asks for no token.
    """
    address = listener.getsockname()[0]
    if not ip_address(address).is_loopback and not app.state.guarded:
        listener.close()
        raise AddressError(f"refusing to serve on {address} without a token: give one, or bind 127.0.0.1")
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http="httptools",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=GRACE_S,
        )
    )
    if over is not None:
        over.add_done_callback(lambda _: setattr(server, "should_exit", True))
    with listener:
        await server.serve(sockets=[listener])


def serve(app: FastAPI, listener: socket.socket) -> None:
    """`serve_until` as the whole work of a process: blocks until SIGTERM or SIGINT."""
    uvloop.run(serve_until(app, listener))


def _resolved(host: str, port: int) -> tuple[Any, Any, Any, Any, Any]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise AddressError(f"{host!r} is not an address that can be listened on: {error.strerror}") from error
