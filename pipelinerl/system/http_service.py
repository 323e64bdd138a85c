"""What every HTTP service of ours shares: a bound socket, a gate that asks for the token, one shape of refusal, an end.

Promises: everything binds loopback unless told otherwise, and another address is refused without a token; the token is
compared in constant time; `/health` alone needs none; whatever is refused is refused in OpenAI's shape, `{"error":
{"message", "type", "param", "code"}}`, without repeating the body; what the application's start raises is raised by
`serve_until`; a signal ends the server after what runs was answered or cut.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_address
from typing import Any, Final, final

import uvicorn
import uvloop
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from pipelinerl.errors import AddressError

#: Longer than a client keeps an idle connection, so that it is the client that closes it and no request meets a close.
KEEP_ALIVE_S: Final = 75
GRACE_S: Final = 3
OPEN_PATH: Final = "/health"
_NOT_JSON: Final = "the body must be JSON, with the header Content-Type: application/json"


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
            message = "a valid bearer token is required: send the header Authorization: Bearer <token>"
            await refusal(401, message, code="unauthorized")(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _may_enter(self, scope: Scope) -> bool:
        if self._expected is None or scope["path"] == OPEN_PATH:
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)


def refusal(status: int, message: str, *, code: str, param: str | None = None) -> JSONResponse:
    """An answer that is not a success; `param` names the field that is wrong."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status)


def refuse_in_one_shape(app: FastAPI) -> None:
    """Make the framework's own refusals, and what nobody foresaw, answer as `refusal` does."""
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _unforeseen)


async def _no_route(request: Request, error: Exception) -> Response:
    """404 and 405; and 400, for a body that is JSON to the eye but not to the parser."""
    assert isinstance(error, HTTPException)
    if error.status_code == 400:
        return refusal(400, _NOT_JSON, code="invalid_json")
    detail = str(error.detail)
    answer = refusal(
        error.status_code, f"{request.method} {request.url.path}: {detail}", code=detail.lower().replace(" ", "_")
    )
    answer.headers.update(error.headers or {})
    return answer


async def _invalid(_: Request, error: Exception) -> Response:
    """The first finding as a sentence, without the input that caused it."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place, *path = (str(part) for part in first["loc"])
    if first["type"] == "json_invalid":
        return refusal(400, _NOT_JSON, code="invalid_json")
    param = ".".join(path) or None
    said = first["msg"].removeprefix("Value error, ")
    return refusal(422, f"{param or place}: {said}", code="invalid_request_error", param=param)


async def _unforeseen(request: Request, _: Exception) -> Response:
    return refusal(500, f"{request.method} {request.url.path} failed; see the service's log", code="internal_error")


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


def url_of(host: str, port: int) -> str:
    """The base URL of what listens there; an IPv6 address stands in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


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
            lifespan="off",
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
        async with _up(app):
            try:
                await server.serve(sockets=[listener])
            finally:  # cancelled, uvicorn leaves the loop watching a descriptor that the next socket may get
                for accepting in getattr(server, "servers", ()):
                    accepting.close()


@asynccontextmanager
async def _up(app: FastAPI) -> AsyncIterator[None]:
    """The application from its start to its end. uvicorn would log what the start raises, and exit."""
    lifespan = app.router.lifespan_context(app)
    await lifespan.__aenter__()
    try:
        yield
    finally:
        end = asyncio.ensure_future(lifespan.__aexit__(None, None, None))
        try:
            await asyncio.shield(end)
        except (
            asyncio.CancelledError
        ):  # the signal that ended the server cancels its task, too: put things in order first
            await end
            raise


def serve(app: FastAPI, listener: socket.socket) -> None:
    """`serve_until` as the whole work of a process: blocks until SIGTERM or SIGINT."""

    async def until_signalled() -> None:
        serving = asyncio.ensure_future(serve_until(app, listener))
        for number in (signal.SIGTERM, signal.SIGINT):  # else uvicorn, when it has ended, lets it kill the process
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        with suppress(asyncio.CancelledError):
            await serving

    uvloop.run(until_signalled())


def _resolved(host: str, port: int) -> tuple[Any, Any, Any, Any, Any]:
    if not 0 <= port <= 65535:
        raise AddressError(f"a port is a number from 0 to 65535, got {port}")
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise AddressError(f"{host!r} is not an address that can be listened on: {error.strerror}") from error
