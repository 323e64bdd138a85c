"""`EngineClient`: the client of the inference contract, for one fleet of engines.

An engine's rejection is raised as the class that the engine raised. A lost request or response is an
`EngineUnreachable` that names the call. Every call has a deadline.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from pydantic import BaseModel, ValidationError

from inference_contract import routes
from inference_contract.errors import ContractError, from_wire, has_error_shape
from inference_contract.schemas import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest, Health, ModelList
from inference_contract.weights import (
    InitProcessGroupRequest,
    ProcessGroupStatus,
    WeightUpdateRequest,
    WeightUpdateResponse,
)
from pipelinerl.errors import EngineUnreachable
from pipelinerl.system.http_client import Disconnected, call_timeout, hot_session, read_at_most, responding

if TYPE_CHECKING:
    import aiohttp

Answer = TypeVar("Answer", bound=BaseModel)

#: Seconds that the client waits beyond the engine's deadline, so that the engine's more specific error arrives first.
_GRACE_S: Final = 1.0
#: Seconds that the client keeps an idle connection: fewer than the server's `http_service.KEEP_ALIVE_S`, so that the
#: client closes it first.
_KEEP_ALIVE_S: Final = 30.0
_JSON: Final = MappingProxyType({"content-type": "application/json"})
#: Maximum size in bytes of a response that is no completion: several times the size of any useful error message.
_MOST_BYTES: Final = 2**20
#: Maximum size in bytes of a completion: a hundred samples of a hundred thousand tokens with log-probs have 500 MB.
_MOST_COMPLETION_BYTES: Final = 2**32
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"
_EVENT_END: Final = b"\n\n"


class EngineClient:
    """Client that calls engines by base URL (`http://host:port`) and keeps their connections; for one event loop."""

    def __init__(
        self, *, token: str | None = None, chat_timeout_s: float = 600.0, state_timeout_s: float = 5.0
    ) -> None:
        """Create a client with limits on a whole completion (`chat_timeout_s`) and on polls (`state_timeout_s`)."""
        self._token = token
        self._session: aiohttp.ClientSession | None = None
        self._chat_timeout_s = chat_timeout_s
        self._state_timeout_s = state_timeout_s
        self._last: tuple[object, bytes] = None, b""
        self._last_answer: tuple[object, bytes, Any] = None, b"", None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def chat(self, url: str, request: ChatCompletionRequest) -> ChatCompletion:
        """POST /v1/chat/completions, not streamed. Cancelling the call cancels the request on the engine."""
        url, timeout_s = url + routes.CHAT_COMPLETIONS, self._chat_timeout_s
        body = request.model_dump_json(exclude_none=True, exclude_defaults=True).encode()
        return _validated(
            url, ChatCompletion, await self._accepted("POST", url, body, timeout_s, most_bytes=_MOST_COMPLETION_BYTES)
        )

    async def stream(self, url: str, request: ChatCompletionRequest) -> AsyncGenerator[ChatCompletionChunk]:
        """POST /v1/chat/completions, streamed; closing cancels. Raises `ContractError` or `EngineUnreachable`."""
        url, timeout_s = url + routes.CHAT_COMPLETIONS, self._chat_timeout_s
        call = f"POST {url}"
        body = request.model_dump_json(exclude_none=True, exclude_defaults=True).encode()
        try:
            async with self._responding("POST", url, body, timeout_s) as response:
                if response.status != 200:
                    raise _refusal(call, response.status, await read_at_most(response, _MOST_BYTES))
                async for event in _events(response.content.iter_any()):
                    yield _chunk(event, url)
        except (ConnectionError, TimeoutError) as error:
            raise _unreachable(call, error, timeout_s) from error

    async def health(self, url: str) -> Health:
        return _validated(url + routes.HEALTH, Health, await self._polled(url, routes.HEALTH))

    async def models(self, url: str) -> ModelList:
        return _validated(url + routes.MODELS, ModelList, await self._polled(url, routes.MODELS))

    async def metrics(self, url: str) -> dict[str, float]:
        """GET /metrics, and return the numbers by name, without the `pipelinerl_engine_` prefix."""
        text = await self._polled(url, routes.METRICS)
        try:
            pairs = [line.rsplit(" ", 1) for line in text.decode().splitlines() if line and not line.startswith("#")]
            return {name.removeprefix("pipelinerl_engine_"): float(value) for name, value in pairs}
        except ValueError:
            raise EngineUnreachable(
                f"{url}{routes.METRICS} must answer in Prometheus' text form. Is it an engine of this contract?"
            ) from None

    async def init_process_group(self, url: str, request: InitProcessGroupRequest) -> ProcessGroupStatus:
        """POST /init_process_group; the request's own timeout limits the wait."""
        return await self._posted(url, routes.INIT_PROCESS_GROUP, ProcessGroupStatus, request)

    async def request_weight_update(self, url: str, request: WeightUpdateRequest) -> WeightUpdateResponse:
        """POST /request_weight_update; the request's own timeout limits the wait."""
        return await self._posted(url, routes.REQUEST_WEIGHT_UPDATE, WeightUpdateResponse, request)

    async def _polled(self, url: str, path: str) -> bytes:
        return await self._accepted("GET", url + path, None, self._state_timeout_s)

    async def _posted(
        self, url: str, path: str, schema: type[Answer], request: InitProcessGroupRequest | WeightUpdateRequest
    ) -> Answer:
        if request is not self._last[0]:  # encode a request once for all engines of a fleet
            self._last = request, request.model_dump_json(exclude_none=True).encode()
        url, body = url + path, self._last[1]
        content = await self._accepted("POST", url, body, request.timeout_s + _GRACE_S, attempts=2)
        known, same, answered = self._last_answer
        if known is not schema or same != content:  # equal answers of several engines are parsed only once
            answered = _validated(url, schema, content)
            self._last_answer = schema, content, answered
        return answered

    async def _accepted(
        self,
        method: str,
        url: str,
        body: bytes | None,
        timeout_s: float,
        *,
        most_bytes: int = _MOST_BYTES,
        attempts: int = 1,
    ) -> bytes:
        """Return the body of a response with status 200; raise `ContractError` or `EngineUnreachable` otherwise.

        A server may close an idle connection just as the client reuses it. An idempotent request may be sent in two
        `attempts`, so that this does not fail it.
        """
        call, deadline = f"{method} {url}", time.monotonic() + timeout_s
        while True:
            attempts -= 1
            try:
                async with self._responding(method, url, body, deadline - time.monotonic()) as response:
                    content = await read_at_most(response, most_bytes)
                if response.status != 200:
                    raise _refusal(call, response.status, content)
                return content
            except Disconnected as error:
                if not attempts:
                    raise _unreachable(call, error, timeout_s) from error
            except (ConnectionError, TimeoutError) as error:
                raise _unreachable(call, error, timeout_s) from error

    def _responding(
        self, method: str, url: str, body: bytes | None, timeout_s: float
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        if self._session is None:
            self._session = hot_session(token=self._token, keep_alive_s=_KEEP_ALIVE_S)
        headers = _JSON if body is not None else None
        return responding(self._session, method, url, body, timeout=call_timeout(timeout_s), headers=headers)


def _validated(call: str, schema: type[Answer], content: bytes) -> Answer:
    try:
        return schema.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise EngineUnreachable(
            f"{call} must answer with a {schema.__name__}; {where}: {first['msg']}. Is it an engine of this contract?"
        ) from None


def _unreachable(call: str, error: Exception, timeout_s: float) -> EngineUnreachable:
    if isinstance(error, TimeoutError):
        return EngineUnreachable(f"{call} had no answer within {timeout_s:g} s")
    return EngineUnreachable(f"{call} failed: {str(error) or type(error).__name__}; is the engine running?")


def _refusal(call: str, status: int, content: bytes) -> ContractError | EngineUnreachable:
    answer = _decoded(content)
    if status >= 500 and not has_error_shape(answer):
        return EngineUnreachable(f"{call} failed: HTTP {status} without the contract's error")
    return from_wire(status, answer)


async def _events(pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the data of server-sent events up to `[DONE]`."""
    rest, done = b"", False
    async for piece in pieces:
        *events, rest = (rest + piece).split(_EVENT_END)
        for event in events:
            data = event.removeprefix(_DATA)
            if data == _DONE:
                done = True
            else:
                yield data
    if not done:
        raise ConnectionError("the stream ended before data: [DONE]")


def _chunk(data: bytes, path: str) -> ChatCompletionChunk:
    try:
        return ChatCompletionChunk.model_validate_json(data)
    except ValidationError:
        answer = _decoded(data)
        if has_error_shape(answer):
            raise from_wire(500, answer) from None
        raise EngineUnreachable(
            f"{path} must stream chunks of a chat completion. Is it an engine of this contract?"
        ) from None


def _decoded(content: bytes) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return None
