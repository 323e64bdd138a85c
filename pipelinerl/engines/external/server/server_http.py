"""`ServerHttp`: the HTTP client for stock servers: JSON calls with deadlines, and streams of events.

Any unexpected response becomes an `EngineUnreachable` that names the call and the response.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| the response to a call | the server | the call's deadline |
| the next event of a stream | the server; cancellation, as by `ServerCore` when the server stops responding | never |
"""

from __future__ import annotations

import math
import resource
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any, Final, final

import aiohttp
import orjson

from pipelinerl.errors import EngineUnreachable
from pipelinerl.system import http_client

#: Shorter than uvicorn's default of 5 s for idle connections, so that the client closes them first.
_KEEP_ALIVE_S: Final = 1.0
#: Timeout of a call that makes the server do no heavy work.
CALL_S: Final = 60.0
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"
_SHOWN: Final = 300


@final
class ServerHttp:
    """The base URL of one server, and connections to it. Used from the event loop that created it.

    Creating it sets this process's limit on open files to the maximum, since every sample holds a connection.

    Args:
        token: the server's API key, if it needs one.
    """

    def __init__(self, url: str, *, token: str | None = None) -> None:
        self.url = url
        self._longest_s = math.inf
        _allow_all_descriptors()
        self._session = http_client.hot_session(token=token, keep_alive_s=_KEEP_ALIVE_S, read_bytes=2**20)

    def hurry(self, longest_s: float) -> None:
        """Limit the timeout of all later calls to `longest_s` seconds."""
        self._longest_s = longest_s

    async def close(self) -> None:
        """Close every connection; the server then frees the memory of the samples that used them."""
        await self._session.close()

    async def get(self, path: str) -> Any:
        """GET a path and return the JSON of a response with status 200."""
        return await self._call("GET", path, None, CALL_S)

    async def answers(self, path: str, *, timeout_s: float) -> bool:
        """Return whether a GET gets any response in time, with any status."""
        try:
            async with self._session.get(self.url + path, timeout=http_client.call_timeout(timeout_s)):
                return True
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def post(self, path: str, body: Any = None, *, timeout_s: float = CALL_S, may_fail: bool = False) -> Any:
        """POST a JSON body. Return the JSON of a response with status 200, or None if its content is not JSON.

        With `may_fail`, no other call reuses the connection, because uvicorn closes it after a server error.
        """
        return await self._call("POST", path, body, timeout_s, headers={"connection": "close"} if may_fail else {})

    async def events(self, path: str, body: Any) -> AsyncIterator[dict[str, Any]]:
        """POST a body and yield the JSON of each server-sent event until `[DONE]`, without a deadline.

        Raises:
            EngineUnreachable: the server rejected the request, is unreachable, or the stream broke off.
        """
        try:
            endless = http_client.call_timeout(math.inf)
            async with self._session.post(self.url + path, json=body, timeout=endless) as answer:
                await self._check("POST", path, answer)
                async for line in answer.content:
                    if line.startswith(_DATA):
                        data = line[len(_DATA) :].strip()
                        if data == _DONE:
                            return
                        yield orjson.loads(data)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise EngineUnreachable(f"POST {self.url}{path} broke off: {_reason(error)}") from error
        raise EngineUnreachable(f"POST {self.url}{path}: the stream ended without data: [DONE]; is the server closing?")

    async def _call(
        self, method: str, path: str, body: Any, timeout_s: float, *, headers: Mapping[str, str] = MappingProxyType({})
    ) -> Any:
        timeout_s = min(timeout_s, self._longest_s)
        timeout = http_client.call_timeout(timeout_s)
        try:
            async with self._session.request(
                method, self.url + path, json=body, timeout=timeout, headers=headers
            ) as answer:
                await self._check(method, path, answer)
                content = await answer.read()
                return orjson.loads(content) if answer.content_type == "application/json" else None
        except TimeoutError as error:
            raise EngineUnreachable(f"{method} {self.url}{path} had no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise EngineUnreachable(f"{method} {self.url}{path} failed: {_reason(error)}") from error

    async def _check(self, method: str, path: str, answer: aiohttp.ClientResponse) -> None:
        if answer.status != 200:
            text = (await answer.text(errors="replace"))[:_SHOWN]
            raise EngineUnreachable(f"{method} {self.url}{path} must answer 200, got {answer.status}: {text}")


def _allow_all_descriptors() -> None:
    """Raise the soft limit on open files to the hard limit: the usual 1024 would cap the number of samples."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
