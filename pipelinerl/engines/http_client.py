"""`EngineClient`: the inference contract's other end, for one fleet of engines.

Promises: what an engine refuses comes back as the class that the engine raised; what never reached it, or never came
back, is an `EngineUnreachable` that names the URL and the call. Every call has a deadline.
"""

from __future__ import annotations

import json
from types import TracebackType
from typing import Final, Self, TypeVar, final

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport
from pydantic import BaseModel, ValidationError

from inference_contract import routes
from inference_contract.errors import from_wire
from inference_contract.schemas import (
    ChatCompletion,
    ChatCompletionRequest,
    Health,
    InitProcessGroupRequest,
    ModelList,
    ProcessGroupStatus,
    WeightUpdateRequest,
    WeightUpdateResponse,
)
from pipelinerl.errors import EngineUnreachable

Answer = TypeVar("Answer", bound=BaseModel)

#: The engine's own deadline comes first, so that its answer, which names the culprit, is the one we get.
_GRACE_S: Final = 1.0
_CONNECT_S: Final = 5.0
#: Idle connections live shorter than the server's (`http_service.KEEP_ALIVE_S`), so that it is the client that closes.
_KEEP_ALIVE_S: Final = 30.0


@final
class EngineClient:
    """Calls engines by base URL (`http://host:port`) and keeps their connections; used from one event loop."""

    def __init__(
        self, *, token: str | None = None, chat_timeout_s: float = 600.0, state_timeout_s: float = 5.0
    ) -> None:
        """
        Args:
            token: bearer token of the engines.
            chat_timeout_s: longest wait for a whole completion.
            state_timeout_s: longest wait for health, models and metrics.
        """
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {token}"} if token else {})
        # A transport, not a client: no cookies, redirects, proxies or authentication are wanted, and each costs time.
        # aiohttp's, whose parser is C and whose pool does not look at every connection for every request: a request
        # takes 0.2 ms of the core instead of 0.5 ms.
        self._transport = AiohttpTransport(client=_new_session)
        self._request_headers = httpx.Headers(self._headers)
        self._chat_timeout_s = chat_timeout_s
        self._state_timeout_s = state_timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        await self._transport.aclose()

    async def chat(self, url: str, request: ChatCompletionRequest) -> ChatCompletion:
        """POST /v1/chat/completions, not streamed; cancelling it cancels it on the engine."""
        body = request.model_dump_json(exclude_none=True, exclude_defaults=True).encode()
        return await self._call(url, routes.CHAT_COMPLETIONS, ChatCompletion, self._chat_timeout_s, body)

    async def health(self, url: str) -> Health:
        """GET /health."""
        return await self._call(url, routes.HEALTH, Health, self._state_timeout_s)

    async def models(self, url: str) -> ModelList:
        """GET /v1/models."""
        return await self._call(url, routes.MODELS, ModelList, self._state_timeout_s)

    async def metrics(self, url: str) -> dict[str, float]:
        """GET /metrics, as numbers by name without the `pipelinerl_engine_` prefix."""
        text = await self._exchange(url, routes.METRICS, self._state_timeout_s, None)
        try:
            pairs = [line.rsplit(" ", 1) for line in text.decode().splitlines() if line and not line.startswith("#")]
            return {name.removeprefix("pipelinerl_engine_"): float(value) for name, value in pairs}
        except ValueError:
            raise EngineUnreachable(
                f"{url}{routes.METRICS} must answer in Prometheus' text form. Is it an engine of this contract?"
            ) from None

    async def init_process_group(self, url: str, request: InitProcessGroupRequest) -> ProcessGroupStatus:
        """POST /init_process_group; waits as long as the request lets the engine wait."""
        body = request.model_dump_json(exclude_none=True).encode()
        return await self._call(url, routes.INIT_PROCESS_GROUP, ProcessGroupStatus, request.timeout_s + _GRACE_S, body)

    async def request_weight_update(self, url: str, request: WeightUpdateRequest) -> WeightUpdateResponse:
        """POST /request_weight_update; waits as long as the request lets the engine wait."""
        body = request.model_dump_json(exclude_none=True).encode()
        return await self._call(
            url, routes.REQUEST_WEIGHT_UPDATE, WeightUpdateResponse, request.timeout_s + _GRACE_S, body
        )

    async def _call(
        self, url: str, path: str, schema: type[Answer], timeout_s: float, body: bytes | None = None
    ) -> Answer:
        content = await self._exchange(url, path, timeout_s, body)
        try:
            return schema.model_validate_json(content)
        except ValidationError as error:
            found = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(str(part) for part in found["loc"])
            raise EngineUnreachable(
                f"{url}{path} must answer with a {schema.__name__}; {where}: {found['msg']}. Is it an engine of this "
                "contract?"
            ) from None

    async def _exchange(self, url: str, path: str, timeout_s: float, body: bytes | None) -> bytes:
        """The body of a 200; anything else is raised.

        Raises:
            ContractError: the engine answered with it.
            EngineUnreachable: no answer, or none in time.
        """
        patience = {"connect": min(_CONNECT_S, timeout_s), "read": timeout_s, "write": timeout_s, "pool": timeout_s}
        method = "GET" if body is None else "POST"
        request = httpx.Request(
            method, url + path, headers=self._request_headers, content=body, extensions={"timeout": patience}
        )
        try:
            response = await self._transport.handle_async_request(request)
            try:
                content = await response.aread()
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            # The transport calls every lost or refused connection a connect timeout; the others are deadlines.
            late = isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout)
            if late:
                what = f"had no answer within {timeout_s:g} s ({type(error).__name__})"
            else:
                what = f"failed: {str(error) or type(error).__name__}; is the engine running?"
            raise EngineUnreachable(f"{method} {url}{path} {what}") from error
        if response.status_code == 200:
            return content
        raise from_wire(response.status_code, _decoded(content))


def _new_session() -> aiohttp.ClientSession:
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


def _decoded(content: bytes) -> object:
    try:
        return json.loads(content)
    except ValueError:
        return None
