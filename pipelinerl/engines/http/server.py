"""`create_app`: an HTTP application that serves the inference contract for any `Engine`.

Every error response has OpenAI's error shape, and none repeats the request's body. Every route is behind
`http_service`'s guard. A client that disconnects cancels its completions, but not a weight update.

All routes are plain ASGI on bytes and bypass Starlette's router, because every engine of a fleet is called often.
FastAPI's layers would raise the CPU time of one phase of a weight update from 45 to 71 µs, and that of a poll of the
engine's state from 55 to 127 µs (the time spent in sockets is not included).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from typing import Final, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_contract import routes
from inference_contract.completions import CompletionRequest, part_of_text, whole_text
from inference_contract.engine import Engine
from inference_contract.errors import ContractError, EngineStopped, InvalidRequest
from inference_contract.schemas import ChatCompletionChunk, ChatCompletionRequest, ModelList
from inference_contract.weights import InitProcessGroupRequest, WeightUpdateRequest
from pipelinerl.observability.status import PROMETHEUS_TYPE, prometheus_text
from pipelinerl.system.background import run_together
from pipelinerl.system.http_service import guard, refuse_in_one_shape, refused_body, unless_gone

Body = TypeVar("Body", bound=BaseModel)

METRICS_PREFIX: Final = "pipelinerl_engine"
_JSON: Final = "application/json"

_LOG = logging.getLogger(__name__)


def create_app(engine: Engine, *, token: str | None) -> Starlette:
    """Return the application that serves `engine`. All routes but `/health` require `token`, if there is one."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.close()

    def metrics() -> str:
        return prometheus_text(engine.metrics().model_dump(), prefix=METRICS_PREFIX)

    def models() -> str:
        return ModelList(data=[engine.model_card()]).model_dump_json(exclude_none=True)

    chat = partial(_chat, engine)
    endpoints = [
        ("POST", routes.CHAT_COMPLETIONS, _Endpoint(chat)),
        ("POST", routes.REQUEST_WEIGHT_UPDATE, _call(WeightUpdateRequest, engine.request_weight_update)),
        ("GET", routes.METRICS, _state(PROMETHEUS_TYPE, metrics)),
        ("GET", routes.HEALTH, _state(_JSON, lambda: engine.health().model_dump_json())),
        ("GET", routes.MODELS, _state(_JSON, models)),
        ("POST", routes.INIT_PROCESS_GROUP, _call(InitProcessGroupRequest, engine.init_process_group)),
        ("POST", routes.CHAT_COMPLETION_ALIAS, _Endpoint(chat)),
        ("POST", routes.COMPLETIONS, _Endpoint(partial(_text, engine))),
    ]
    # The endpoints are objects, not functions, so Starlette checks the method only if `methods` is given.
    found = [Route(path, endpoint, methods=[method]) for method, path, endpoint in endpoints]
    app = Starlette(routes=found, lifespan=lifespan)
    refuse_in_one_shape(app)
    app.add_middleware(_Refusals, served={(method, path): endpoint for method, path, endpoint in endpoints})
    guard(app, token=token)
    return app


# --- requests ----------------------------------------------------------------------------------------------------


async def _parsed(schema: type[Body], receive: Receive) -> Body:
    """Parse the body by `schema`. Raises `InvalidRequest`, or `HTTPException` for a body that is too large or late."""
    body = await Request({"type": "http"}, receive).body()
    with _validation():
        return schema.model_validate_json(body)


@contextmanager
def _validation() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        more = "" if error.error_count() == 1 else f" (and {error.error_count() - 1} more)"
        reason = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            reason = "this engine does not support it, or not with this value; leave it out"
        raise InvalidRequest(f"{param or 'body'}: {reason}{more}", param=param) from None


class _Endpoint:
    """A route's endpoint as an ASGI object, because Starlette wraps functions in its own request and response."""

    def __init__(self, serve: Callable[[Receive, Send], Awaitable[None]]) -> None:
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(receive, send)


def _call(schema: type[Body], verb: Callable[[Body], Awaitable[BaseModel]]) -> _Endpoint:
    """Return a POST route with a request schema; its work completes even if the client disconnects."""

    async def serve(receive: Receive, send: Send) -> None:
        await _answer(send, await verb(await _parsed(schema, receive)))

    return _Endpoint(serve)


def _state(media_type: str, text: Callable[[], str]) -> _Endpoint:
    async def serve(receive: Receive, send: Send) -> None:
        await _respond(send, 200, text().encode(), media_type=media_type)

    return _Endpoint(serve)


async def _chat(engine: Engine, receive: Receive, send: Send) -> None:
    request = await _parsed(ChatCompletionRequest, receive)
    if request.stream:
        await unless_gone(_send_events(engine.stream(request), lambda chunk: chunk, send), receive)
    else:
        await _answer(send, await unless_gone(engine.complete(request), receive))


async def _text(engine: Engine, receive: Receive, send: Send) -> None:
    request = await _parsed(CompletionRequest, receive)
    with _validation():
        chats = request.chats()
    if request.stream:
        await unless_gone(_send_events(engine.stream(chats[0]), part_of_text, send), receive)
    else:
        await _answer(send, whole_text(await unless_gone(run_together(map(engine.complete, chats)), receive)))


async def _send_events(
    stream: AsyncIterator[ChatCompletionChunk], shown: Callable[[ChatCompletionChunk], BaseModel], send: Send
) -> None:
    """Send a stream as server-sent events. The status is sent with the first chunk, so an earlier error can set it."""
    begun = False
    async with aclosing(stream) as chunks:  # type: ignore[type-var]
        try:
            async for chunk in chunks:
                if not begun:
                    await send(_head(200, b"text/event-stream", (b"cache-control", b"no-cache")))
                    begun = True
                await _event(send, shown(chunk).model_dump_json(exclude_none=True).encode())
        except ContractError as error:
            if not begun:
                raise
            await _event(send, json.dumps(error.to_wire()).encode())
    if not begun:
        raise ContractError("the engine ended the stream before its first chunk")
    await _event(send, b"[DONE]", last=True)


# --- answers -----------------------------------------------------------------------------------------------------


def _head(status: int, media_type: bytes, *headers: tuple[bytes, bytes]) -> Message:
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", media_type), *headers]}


async def _answer(send: Send, answer: BaseModel) -> None:
    await _respond(send, 200, answer.model_dump_json(exclude_none=True).encode())


async def _refuse(send: Send, error: ContractError) -> None:
    await _respond(send, error.status, json.dumps(error.to_wire()).encode())


async def _respond(send: Send, status: int, body: bytes, *, media_type: str = _JSON) -> None:
    await send(_head(status, media_type.encode(), (b"content-length", str(len(body)).encode())))
    await send({"type": "http.response.body", "body": body})


async def _event(send: Send, data: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": not last})


class _Refusals:
    """Middleware that converts contract errors to responses. Routes in `served` have their own endpoints; all other
    requests go to `app`.

    A disconnected client gets no response. If shutdown cancels a request before its response has begun, the response
    directs the client to another engine.
    """

    def __init__(self, app: ASGIApp, served: Mapping[tuple[str, str], ASGIApp]) -> None:
        self._app = app
        self._served = served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, app = False, self._served.get((scope.get("method", ""), scope.get("path", "")), self._app)

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await app(scope, receive, noted)
        except asyncio.CancelledError:
            if not begun:
                await _refuse(
                    send, EngineStopped("the engine is closing and has not finished this; send it to another one")
                )
            raise
        except ContractError as error:
            await _refuse(send, error)
        except HTTPException as error:
            await refused_body(error)(scope, receive, send)
        except ClientDisconnect:  # so no response is sent
            _LOG.info("client left %s", scope["path"])
