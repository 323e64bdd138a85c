"""`ServiceClient`: requests to services that answer with heartbeats (`http_service.HeartbeatRoute`), and their retries.

A request fails if the service is unreachable or silent, drops the connection, sends too much, or answers 5xx or in
another form. Its caller retries it, here or at another service, during a grace period (`Grace`).

| waits for | at most | unblocked by |
|---|---|---|
| the next heartbeat of a service | `silence_s`, then `ServiceFailed` | a heartbeat each second |
| its answer | `timeout_s`, then `ServiceFailed` | the service |
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from pipelinerl.system.http_client import (
    KEEP_ALIVE_S,
    ResponseTooLarge,
    call_timeout,
    hot_session,
    read_at_most,
    responding,
)

if TYPE_CHECKING:
    import aiohttp

Answer = TypeVar("Answer")

#: Error code of a service that holds its maximum number of requests.
IS_FULL: Final = "full"
_JSON: Final = {"content-type": "application/json"}
_SHOWN_CHARS: Final = 300
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class ServicePatience:
    """Timeouts for requests to services, in seconds.

    Attributes:
        grace_s: time from a request's first failure during which the caller retries it.
        silence_s: longest time without a heartbeat.
        timeout_s: longest time until the answer.
    """

    grace_s: float = 60.0
    silence_s: float = 30.0
    timeout_s: float = 900.0


class ServiceFailed(Exception):
    """A service failed to process a request; a retry at this or another service may succeed."""


class ServiceMalformed(ServiceFailed):
    """A service answers in another form than expected."""


class ServiceFull(Exception):
    """The service holds its maximum number of requests; a later attempt may succeed."""


class RequestRejected(Exception):
    """The service rejects the request with `status`; a retry at this service would fail, too."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Grace:
    """The period in which one request is retried: `grace_s` seconds from its first failure."""

    grace_s: float
    until: float = math.inf
    """End of the period on the monotonic clock; infinite before the first failure."""
    reason: str = ""
    pause_s: float = _FIRST_PAUSE_S

    def failed(self, reason: str) -> None:
        self.reason = reason
        self.until = min(self.until, time.monotonic() + self.grace_s)

    def is_over(self, pause_s: float = 0.0) -> bool:
        return time.monotonic() + pause_s >= self.until

    async def pause(self, error: Exception) -> None:
        """Record a failure and wait, longer each time; raise `error` instead if the period would end meanwhile."""
        self.failed(str(error))
        if self.is_over(self.pause_s):
            raise error
        await asyncio.sleep(self.pause_s)
        self.pause_s = min(2 * self.pause_s, _LONGEST_PAUSE_S)


class ServiceClient:
    """Client of services of one `kind` (for errors). Use and close it in a single event loop."""

    def __init__(self, kind: str, *, token: str | None, patience: ServicePatience = ServicePatience()) -> None:
        self.patience: Final = patience
        self._kind = kind
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    async def post(self, url: str, body: bytes, answer: type[Answer], *, most_bytes: int) -> Answer:
        """POST a JSON body and return the JSON response, of at most `most_bytes`, as a value of type `answer`.

        Raises `ServiceFailed`, `ServiceFull` or `RequestRejected`, which name the URL.
        """
        timeout = call_timeout(self.patience.timeout_s, silence_s=self.patience.silence_s)
        content = await self.content("POST", url, body, headers=_JSON, timeout=timeout, most_bytes=most_bytes)
        return self._decoded(url, content, answer)

    async def get(self, url: str, answer: type[Answer], *, most_bytes: int) -> Answer:
        """GET a JSON response within `silence_s`; otherwise like `post`."""
        timeout = call_timeout(self.patience.silence_s)
        return self._decoded(url, await self.content("GET", url, timeout=timeout, most_bytes=most_bytes), answer)

    async def content(
        self,
        method: str,
        url: str,
        body: bytes | None = None,
        *,
        most_bytes: int,
        timeout: aiohttp.ClientTimeout | None = None,
        headers: Mapping[str, str] | None = None,
        query: Mapping[str, str] | None = None,
    ) -> bytes:
        if self._session is None:
            self._session = hot_session(token=self._token, keep_alive_s=KEEP_ALIVE_S)
        timeout = timeout or call_timeout(self.patience.timeout_s)
        try:
            async with responding(
                self._session, method, url, body, timeout=timeout, headers=headers, params=query
            ) as response:
                content, status = await read_at_most(response, most_bytes), response.status
        except TimeoutError as error:
            raise ServiceFailed(f"{url} has been silent for too long ({str(error) or 'TimeoutError'})") from None
        except ResponseTooLarge as error:
            raise ServiceFailed(str(error)) from None
        except ConnectionError as error:
            raise ServiceFailed(f"{url} cannot be reached or closed the connection ({error})") from None
        if status == 200:
            return content
        message, code = error_of(content)
        words = f"{url} refuses ({status}): {message}"
        if status == 503 and code == IS_FULL:
            raise ServiceFull(words)
        raise ServiceFailed(words) if status >= 500 else RequestRejected(words, status)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _decoded(self, url: str, content: bytes, answer: type[Answer]) -> Answer:
        try:
            return msgspec.json.decode(content, type=answer)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ServiceMalformed(f"{url} is not {self._kind}: {error}") from None


def error_of(content: bytes) -> tuple[str, str]:
    """Return (message, code) of an error in OpenAI's format; for other content, (its beginning, "")."""
    try:
        error = msgspec.json.decode(content, type=Mapping[str, Mapping[str, str | None]])["error"]
        return str(error.get("message"))[:_SHOWN_CHARS], str(error.get("code"))
    except (msgspec.DecodeError, ValueError, RecursionError, KeyError):
        return content[:80].decode(errors="replace"), ""
