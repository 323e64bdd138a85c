"""Shared parts of all our HTTP services: a bound socket, limits, authentication, one error format, and shutdown.

- A service without a token may bind only loopback.
- The token is compared in constant time; only `/health` can be requested without it.
- Web pages of other origins cannot make a server act, with or without a token.
- Bodies are JSON, limited in size and time; `connection` limits connections and headers.
- Errors have OpenAI's format, `{"error": {"message", "type", "param", "code"}}`, and do not repeat the body.
- On a signal, the server ends once all running requests are answered or cancelled.
- `HeartbeatRoute` begins its response immediately, and sends heartbeats while the work runs.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import logging
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from enum import Enum
from ipaddress import ip_address
from typing import Any, Final, TypeVar, cast
from urllib.parse import urlsplit

import msgspec
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from pipelinerl.errors import AddressError, UserError
from pipelinerl.system.background import cancel_all, to_its_end
from pipelinerl.system.connection import KEEP_ALIVE_S, LimitedConnection
from pipelinerl.system.machine import LOOPBACK, address_towards
from pipelinerl.system.service_client import IS_FULL

log = logging.getLogger("pipelinerl")

T = TypeVar("T")

GRACE_S: Final = 3
OPEN_PATH: Final = "/health"

#: Maximum size of a body, far above real ones: the layout of 100,000 parameters takes 10 MB, and prompts far less.
MAX_BODY_BYTES: Final = 32 * 2**20
#: Time limit for receiving a request's body.
BODY_TIMEOUT_S: Final = 30.0

_NOT_JSON: Final = "the body must be JSON, with the header Content-Type: application/json"
_TOO_LARGE: Final = "the body must be at most {} bytes, got more"
#: Security-relevant headers. A request that repeats one is rejected, since two parsers could disagree on its value.
_DECIDING: Final = frozenset(
    {
        b"authorization", b"host", b"origin", b"sec-fetch-site", b"content-type", b"content-encoding",
        b"content-length", b"transfer-encoding", b"content-range", b"range",
    }
)  # fmt: skip
_READS_ONLY: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_CODES: Final = {408: "body_too_slow", 413: "body_too_large"}


class BodyRule(Enum):
    """The limit on a route's request bodies (size, receiving time): set here (`JSON`), or by the route (`STREAMED`)."""

    JSON = "here: JSON, MAX_BODY_BYTES at most, within BODY_TIMEOUT_S"
    STREAMED = "the route, which takes it as it comes"


def guard(app: Starlette, *, token: str | None, puts: BodyRule = BodyRule.JSON) -> None:
    """Add authentication, and limits on bodies, in front of the application; `puts` is the rule for bodies of PUT.

    Without a `token`, only loopback is served, and all requests of this machine except those of web pages are accepted.
    """
    app.add_middleware(_Gate, token=token, puts=puts)
    app.state.guarded = token is not None


class _Gate:
    def __init__(self, app: ASGIApp, token: str | None, puts: BodyRule) -> None:
        self._app = app
        self._expected = None if token is None else f"bearer {token}".encode()
        self._streamed = "PUT" if puts is BodyRule.STREAMED else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given: dict[bytes, bytes] = {}
        for name, value in scope["headers"]:
            if name in _DECIDING:
                if name in given:
                    message = f"the header {name.decode()} must be sent once"
                    await refusal(400, message, code="repeated_header")(scope, receive, send)
                    return
                given[name] = value
        refused = self._stranger(scope, given) or self._web_page(scope, given)
        if refused is None and scope["method"] != self._streamed:
            refused = _unfit_body(scope, given)
            receive = _BoundedBody(receive)
        await (self._app if refused is None else refused)(scope, receive, send)

    def _stranger(self, scope: Scope, given: dict[bytes, bytes]) -> Response | None:
        if self._expected is None or scope["path"] == OPEN_PATH:
            return None
        scheme, _, credential = given.get(b"authorization", b"").partition(b" ")
        # The scheme's name is case-insensitive (RFC 7235, 2.1).
        if hmac.compare_digest(scheme.lower() + b" " + credential.strip(), self._expected):
            return None
        message = "a valid bearer token is required: send the header Authorization: Bearer <token>"
        if credential:
            message = "the bearer token is not the one of this run; use the one in tokens.json of the run's directory"
        return refusal(401, message, code="unauthorized")

    def _web_page(self, scope: Scope, given: dict[bytes, bytes]) -> Response | None:
        host, origin = given.get(b"host", b""), given.get(b"origin")
        if self._expected is None and not _is_own_name(host):
            message = "without a token, Host must be localhost or an IP address: other names could be redirected here"
            return refusal(421, message, code="foreign_host")
        foreign = origin is not None and origin != scope["scheme"].encode() + b"://" + host
        if not foreign and scope["method"] not in _READS_ONLY:
            foreign = given.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin")
        if foreign:
            return refusal(403, "pages of other origins may not use this server", code="foreign_origin")
        return None


def _is_own_name(host: bytes) -> bool:
    """Return True if the Host header is `localhost` or an IP address, which no name server can redirect.

    Without this check, the name evil.example could resolve first to the attacker's server and then to this one. The
    browser would consider both the same origin (DNS rebinding).
    """
    try:
        name = urlsplit("//" + host.decode("ascii")).hostname or ""
        return name == "localhost" or bool(ip_address(name))
    except ValueError:
        return False


def _unfit_body(scope: Scope, given: dict[bytes, bytes]) -> Response | None:
    """Return the response that rejects a body unless it is uncompressed JSON; None if the body is acceptable.

    The body is not read: this follows from the request's headers, `given`.

    Only JSON is accepted, because a browser sends a preflight request before it lets a web page of another origin send
    JSON, but none before it sends an HTML form.
    """
    size = given.get(b"content-length", b"0")
    if (size == b"0" and b"transfer-encoding" not in given) or scope["method"] in _READS_ONLY:
        return None
    if size.isdigit() and int(size) > MAX_BODY_BYTES:
        return refusal(413, _TOO_LARGE.format(MAX_BODY_BYTES), code=_CODES[413])
    if given.get(b"content-type", b"").partition(b";")[0].strip().lower() != b"application/json":
        return refusal(415, _NOT_JSON, code="not_json")
    if given.get(b"content-encoding", b"identity").lower() != b"identity":
        return refusal(415, "the body must not be compressed: leave Content-Encoding out", code="compressed")
    return None


class _BoundedBody:
    """An ASGI `receive` function that raises HTTPException for a body that is too large or too slow."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._size = 0
        self._deadline: float | None = None
        self._is_whole = False

    async def __call__(self) -> Message:
        if self._is_whole:  # after the body, the only message is the client's disconnect
            return await self._receive()
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + BODY_TIMEOUT_S
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            raise HTTPException(408, f"the body must arrive within {BODY_TIMEOUT_S:g} s") from None
        self._size += len(message.get("body", b""))
        if self._size > MAX_BODY_BYTES:
            raise HTTPException(413, _TOO_LARGE.format(MAX_BODY_BYTES))
        self._is_whole = not message.get("more_body", False)
        return message


def refusal(status: int, message: str, *, code: str, param: str | None = None) -> JSONResponse:
    """Return an error response; `param` names the invalid field."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status)


def json_response(value: msgspec.Struct) -> Response:
    """Return a response with the value as JSON."""
    return Response(msgspec.json.encode(value), media_type="application/json")


def refuse_in_one_shape(app: Starlette) -> None:
    """Make `app` report the framework's own errors, and unexpected exceptions, in the format of `refusal`."""
    from fastapi.exceptions import RequestValidationError  # imported only here, since not every service needs fastapi

    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(Exception, _unforeseen)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:
        return refusal(400, _NOT_JSON, code="invalid_json")
    if error.status_code in _CODES:
        return refused_body(error)
    detail = str(error.detail)
    answer = refusal(
        error.status_code, f"{request.method} {request.url.path}: {detail}", code=detail.lower().replace(" ", "_")
    )
    answer.headers.update(error.headers or {})
    return answer


def refused_body(error: HTTPException) -> Response:
    """Return the response for the exception that `receive` raised for a body that was too large or too slow."""
    return refusal(error.status_code, str(error.detail), code=_CODES[error.status_code])


async def _invalid(_: Request, error: Exception) -> Response:
    """Report the first validation error, without repeating the invalid input."""
    from fastapi.exceptions import RequestValidationError

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
    """Return a listening socket; port 0 means any free port. Raises `AddressError` if it cannot be bound."""
    if not 0 <= port <= 65535:
        raise AddressError(f"a port is a number from 0 to 65535, got {port}")
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except socket.gaierror as error:
        raise AddressError(f"{host!r} is not an address that can be listened on: {error.strerror}") from error
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Connections inherit this option. Without it, a response's body waits for the acknowledgement of its head, which
    # the receiver delays by 40 ms.
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
    """Return the base URL of a service; IPv6 addresses are put in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def offered_url(bound: tuple[Any, ...], controller_url: str, *, what: str = "engine") -> str:
    """Return the URL at which other machines reach a service that listens at `bound`, (host, port, …).

    Raises:
        UserError: the service is not reachable from the controller's machine, or the controller's URL is invalid.
        AddressError: the controller's host is unknown, or no route leads there.
    """
    host, port = bound[:2]
    try:
        parts = urlsplit(controller_url)
        facing = address_towards(parts.hostname or "", parts.port or 80)
        facing = LOOPBACK if ip_address(facing).is_loopback else facing
    except ValueError as error:
        raise UserError(f"the controller's URL must be like http://host:8000, got {controller_url}: {error}") from None
    except OSError as error:
        raise AddressError(f"no route to the controller at {controller_url}: {error.strerror or error}") from error
    if ip_address(host).is_unspecified:
        host = facing
    if ip_address(host).is_loopback and not ip_address(facing).is_loopback:
        raise UserError(
            f"the controller at {controller_url} is not on loopback, but this {what} listens at {host} only, "
            f"where other machines cannot reach it; start it with --host {facing}"
        )
    return url_of(host, port)


def config_of(app: ASGIApp) -> uvicorn.Config:
    """Return the uvicorn configuration for an application, whose lifespan the caller must run."""
    return uvicorn.Config(
        app,
        http=LimitedConnection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )


async def serve_until(app: Starlette, listener: socket.socket, *, over: asyncio.Future[Any] | None = None) -> None:
    """Serve a guarded application on `listener` until `over` completes, a signal arrives or this task is cancelled.

    Raises `AddressError` if other machines could reach an application without a token.
    """
    address = listener.getsockname()[0]
    if not ip_address(address).is_loopback and not app.state.guarded:
        listener.close()
        raise AddressError(f"refusing to serve on {address} without a token: give one, or bind 127.0.0.1")
    server = uvicorn.Server(config_of(app))
    if over is not None:
        over.add_done_callback(lambda _: setattr(server, "should_exit", True))
    lifespan = app.router.lifespan_context(app)
    with listener:
        log.info("serving at %s", url_of(*listener.getsockname()[:2]))
        await lifespan.__aenter__()  # startup errors are raised here, but would only be logged by uvicorn
        try:
            await server.serve(sockets=[listener])
        finally:
            # A cancelled uvicorn leaves the descriptor in the event loop, where a later socket may reuse it.
            for accepting in getattr(server, "servers", ()):
                accepting.close()
            # The signal that ends the server also cancels this task; the cleanup must still complete.
            await to_its_end(lifespan.__aexit__(None, None, None))


@asynccontextmanager
async def serving(app: Starlette, listener: socket.socket) -> AsyncIterator[None]:
    """Serve an application in the background. Raises `AddressError` if `listener` is not on loopback."""
    address = listener.getsockname()[0]
    if not ip_address(address).is_loopback:
        listener.close()
        raise AddressError(f"refusing to serve on {address}: a background service must bind loopback")
    config = config_of(app)
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: cast(asyncio.Protocol, LimitedConnection(config, state, {})), sock=listener
    )
    try:
        yield
    finally:
        server.close()
        for connection in list(state.connections):
            connection.shutdown()
        await cancel_all(state.tasks)


def serve(app: Starlette, listener: socket.socket) -> None:
    """Serve the application until SIGTERM or SIGINT, as the only work of a process."""

    async def until_signalled() -> None:
        serving = asyncio.ensure_future(serve_until(app, listener))
        for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn's own handlers would raise the signal again
            asyncio.get_running_loop().add_signal_handler(number, serving.cancel)
        with suppress(asyncio.CancelledError):
            await serving

    uvloop.run(until_signalled())


#: Interval at which a working service sends a space as heartbeat, until it answers.
HEARTBEAT_S: Final = 1.0


#: Error code of a request of another version of the service's protocol.
OTHER_PROTOCOL: Final = "other_protocol"


async def unless_gone(work: Awaitable[T], receive: Receive) -> T:
    """Return the result of `work`; cancel `work` and raise `ClientDisconnect` if the client disconnects first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class RequestRefused(Exception):
    """The service rejects a request, with a status, a code and a reason."""

    def __init__(self, status: int, code: str, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.code = code


#: Usual maximum number of items of work that a service holds.
MOST_WAITING: Final = 65_536


class Backlog:
    """The items of work (`kind` in errors) that a service of a protocol version holds, at most `most`."""

    def __init__(self, kind: str, *, protocol: int, most: int = MOST_WAITING) -> None:
        self._kind = kind
        self._protocol = protocol
        self._most = most
        self.count = 0
        """Number of items that are accepted and not done."""

    def admit(self, count: int, *, protocol: int) -> None:
        """Raise `RequestRefused` for another protocol, or without room for `count` more items."""
        if protocol != self._protocol:
            message = f"protocol must be {self._protocol}, got {protocol}: use one version of pipelinerl"
            raise RequestRefused(409, OTHER_PROTOCOL, message)
        if self.count and self.count + count > self._most:
            raise RequestRefused(503, IS_FULL, f"this service holds {self.count} {self._kind} already; retry later")

    @contextmanager
    def holding(self, count: int) -> Iterator[None]:
        self.count += count
        try:
            yield
        finally:
            self.count -= count


class HeartbeatRoute:
    """A POST route for one type of request, as an ASGI application. It cancels the work if the client disconnects."""

    #: A coroutine that returns the answer.
    Work = Coroutine[Any, Any, msgspec.Struct]

    def __init__(self, request: Any, begin: Callable[[Any], Work]) -> None:
        """Create the route; `begin` returns the work for a body of type `request`, or raises `RequestRefused`."""
        self._type = request
        self._begin = begin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            work = self._begin(msgspec.json.decode(await Request(scope, receive).body(), type=self._type))
        except ClientDisconnect:
            return
        # The error's message names the expected type and path, never the content.
        except msgspec.ValidationError as error:
            await refusal(422, str(error), code="invalid_request_error")(scope, receive, send)
        # Malformed JSON may raise any of these three exceptions.
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            await refusal(400, "the body must be JSON", code="invalid_json")(scope, receive, send)
        except RequestRefused as refused:
            await refusal(refused.status, str(refused), code=refused.code)(scope, receive, send)
        else:
            await self._answered(work, receive, send)

    async def _answered(self, work: Work, receive: Receive, send: Send) -> None:
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(receive())
        try:
            headers = [(b"content-type", b"application/json")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            while not working.done():
                await asyncio.wait({working, leaving}, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    return
                if not working.done():
                    await send({"type": "http.response.body", "body": b" ", "more_body": True})
            body = msgspec.json.encode(working.result())
            await send({"type": "http.response.body", "body": body, "more_body": False})
        finally:
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)
