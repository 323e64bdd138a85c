"""`ServerHttp`: the HTTP that a stock server's adapter speaks: JSON calls with deadlines, and streams of events.

Whatever is not the answer that was expected is an `EngineUnreachable` that names the call, and says what came.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| a call's answer | the server | the call's deadline |
| the next event of a stream | the server; whoever cancels it, as `ServerCore` does when the server is silent | never |
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

#: uvicorn, which both servers run on, closes after 5 s unless it is told otherwise.
_KEEP_ALIVE_S: Final = 1.0
#: How long a call that changes nothing heavy may take.
CALL_S: Final = 60.0
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"
_SHOWN: Final = 300


@final
class ServerHttp:
    """One server's base URL, and connections to it. Used from the event loop in which it was made.

    Making one raises this process's limit of descriptors as far as it goes: every sample holds a connection.

    Args:
        token: its API key, if it wants one.
    """

    def __init__(self, url: str, *, token: str | None = None) -> None:
        self.url = url
        self._longest_s = math.inf
        _allow_all_descriptors()
        self._session = http_client.hot_session(token=token, keep_alive_s=_KEEP_ALIVE_S, read_bytes=2**20)

    def hurry(self, longest_s: float) -> None:
        """From now on no call waits longer than so many seconds for its answer."""
        self._longest_s = longest_s

    async def close(self) -> None:
        """Cut every connection; the server frees what they held."""
        await self._session.close()

    async def get(self, path: str) -> Any:
        """GET; the JSON of a 200."""
        return await self._call("GET", path, None, CALL_S)

    async def answers(self, path: str, *, timeout_s: float) -> bool:
        """Returns whether anything comes back from a GET in time, whatever it says."""
        try:
            async with self._session.get(self.url + path, timeout=http_client.call_timeout(timeout_s)):
                return True
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def post(self, path: str, body: Any = None, *, timeout_s: float = CALL_S, may_fail: bool = False) -> Any:
        """POST a JSON body; the JSON of a 200, None if it has other text.

        With `may_fail`, no other call comes by the same connection: uvicorn hangs up after a fault of the server's.
        """
        return await self._call("POST", path, body, timeout_s, headers={"connection": "close"} if may_fail else {})

    async def events(self, path: str, body: Any) -> AsyncIterator[dict[str, Any]]:
        """POST, and the JSON of each server-sent event until `[DONE]`; it waits for the next one without a deadline.

        Raises:
            EngineUnreachable: the server refused, is not there, or the stream broke off.
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
            raise EngineUnreachable(f"POST {self.url}{path} broke off: {_said(error)}") from error
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
            raise EngineUnreachable(f"{method} {self.url}{path} failed: {_said(error)}") from error

    async def _check(self, method: str, path: str, answer: aiohttp.ClientResponse) -> None:
        if answer.status != 200:
            text = (await answer.text(errors="replace"))[:_SHOWN]
            raise EngineUnreachable(f"{method} {self.url}{path} must answer 200, got {answer.status}: {text}")


def _allow_all_descriptors() -> None:
    """Raise the soft limit to the hard one: it is 1024 on most systems, and beyond it no sample could be begun."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _said(error: BaseException) -> str:
    return str(error) or type(error).__name__
