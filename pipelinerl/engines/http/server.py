"""`create_app`: the inference contract over HTTP, in front of anything that satisfies `Engine`.

Promises: every answer that is not a success has OpenAI's error shape, whatever went wrong; no error repeats the body;
every route is behind `http_service`'s gate; a client that goes away cancels what it asked for.

The POSTs are plain ASGI on bytes, for they are the hot path: one validation of the body, one serialisation of the
answer, nothing between.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, Final, TypeVar

from fastapi import FastAPI, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference_contract import routes
from inference_contract.engine import Engine
from inference_contract.errors import ContractError, EngineStopped, InvalidRequest
from inference_contract.schemas import ChatCompletionRequest, Health, ModelList
from inference_contract.weights import InitProcessGroupRequest, WeightUpdateRequest
from pipelinerl.observability.metrics import PROMETHEUS_TYPE, prometheus_text
from pipelinerl.system.http_service import guard, refuse_in_one_shape

Body = TypeVar("Body", bound=BaseModel)

METRICS_PREFIX: Final = "pipelinerl_engine"

_LOG = logging.getLogger(__name__)


class _Disconnected(Exception):
    """The client went away; nobody is there to answer."""


def create_app(engine: Engine, *, token: str | None) -> FastAPI:
    """The application that serves `engine`; it starts the engine when it starts and closes it when it stops.

    Args:
        token: the bearer token that every route but `/health` requires; None lets everybody in.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await engine.start()
        try:
            yield
        finally:
            await engine.close()

    app = FastAPI(title="pipelinerl inference contract", lifespan=lifespan, openapi_url=None)
    chat = _Chat(engine)
    for path in (routes.CHAT_COMPLETIONS, routes.CHAT_COMPLETION_ALIAS):
        app.router.routes.append(_post(path, chat))
    app.router.routes.append(
        _post(routes.INIT_PROCESS_GROUP, _Call(InitProcessGroupRequest, engine.init_process_group))
    )
    app.router.routes.append(
        _post(routes.REQUEST_WEIGHT_UPDATE, _Call(WeightUpdateRequest, engine.request_weight_update))
    )
    app.router.routes.extend(_state_routes(engine))
    refuse_in_one_shape(app)
    app.add_middleware(_Refusals)
    guard(app, token=token)
    return app


def _state_routes(engine: Engine) -> list[APIRoute]:
    async def health() -> Health:
        return engine.health()

    async def models() -> ModelList:
        return ModelList(data=[engine.model_card()])

    async def metrics() -> Response:
        return Response(
            prometheus_text(engine.metrics().model_dump(), prefix=METRICS_PREFIX),
            media_type=PROMETHEUS_TYPE,
        )

    return [
        APIRoute(routes.HEALTH, health, methods=["GET"]),
        APIRoute(routes.MODELS, models, methods=["GET"], response_model_exclude_none=True),
        APIRoute(routes.METRICS, metrics, methods=["GET"]),
    ]


def _post(path: str, endpoint: ASGIApp) -> Route:
    # Starlette takes an instance for an ASGI application and then filters no method unless told to.
    return Route(path, endpoint, methods=["POST"])


# --- requests ----------------------------------------------------------------------------------------------------


async def _parsed(schema: type[Body], receive: Receive) -> Body:
    """The validated body.

    Raises:
        InvalidRequest: malformed, or not as the schema wants it; `param` is the path of the field.
        HTTPException: too large, or not here in time.
    """
    body = await _body(receive)
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise _invalid(error) from None


async def _body(receive: Receive) -> bytes:
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Disconnected
        chunks.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(chunks)


def _invalid(error: ValidationError) -> InvalidRequest:
    """The first finding as a sentence, without the input that caused it."""
    first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"]) or None
    more = "" if error.error_count() == 1 else f" (and {error.error_count() - 1} more)"
    reason = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        reason = "this engine does not know it, or not with this value, and would ignore it; leave it out"
    return InvalidRequest(f"{param or 'body'}: {reason}{more}", param=param)


async def _unless_gone(work: Awaitable[Any], receive: Receive) -> Any:
    """The result of `work`, which is cancelled when the client goes away first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(receive())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _Disconnected
        return task.result()
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class _Call:
    """A POST that takes one schema and answers with another; it runs to its end even if the client goes away."""

    def __init__(self, schema: type[Body], verb: Callable[[Body], Awaitable[BaseModel]]) -> None:
        self._schema: type[Any] = schema
        self._verb: Callable[[Any], Awaitable[BaseModel]] = verb

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = await self._verb(await _parsed(self._schema, receive))
        await _answer(send, 200, answer.model_dump_json(exclude_none=True).encode())


class _Chat:
    """`/v1/chat/completions`, whole or streamed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = await _parsed(ChatCompletionRequest, receive)
        if not request.stream:
            completion = await _unless_gone(self._engine.complete(request), receive)
            await _answer(send, 200, completion.model_dump_json(exclude_none=True).encode())
            return
        await _unless_gone(self._stream(request, send), receive)

    async def _stream(self, request: ChatCompletionRequest, send: Send) -> None:
        """Server-sent events. The status waits for the first chunk, so that a refusal is still a plain error."""
        begun = False
        async with aclosing(self._engine.stream(request)) as chunks:  # type: ignore[type-var]
            try:
                async for chunk in chunks:
                    if not begun:
                        await send(_head(200, b"text/event-stream", (b"cache-control", b"no-cache")))
                        begun = True
                    await _event(send, chunk.model_dump_json(exclude_none=True).encode())
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


async def _answer(send: Send, status: int, body: bytes) -> None:
    await send(_head(status, b"application/json", (b"content-length", str(len(body)).encode())))
    await send({"type": "http.response.body", "body": body})


async def _event(send: Send, data: bytes, *, last: bool = False) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": not last})


class _Refusals:
    """Turns contract errors into answers, and the leaving of a client into silence.

    A request that is cancelled is one that the end of the server has met, after its grace: the client is told to ask
    elsewhere, if no answer has begun.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noted(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            if not begun:
                stopped = EngineStopped("the engine is closing and has not finished this; send it to another one")
                await _answer(send, stopped.status, json.dumps(stopped.to_wire()).encode())
            raise
        except ContractError as error:
            await _answer(send, error.status, json.dumps(error.to_wire()).encode())
        except _Disconnected:
            _LOG.info("client left %s", scope["path"])
