"""HTTP clients. Processes open all HTTP connections through this module, with the run's token and with deadlines.

Proxies from the environment are ignored, since the token is only for the run's peers.

| opened by | library | for | because, measured on two cores over loopback |
|---|---|---|---|
| `session`, `async_session` | httpx | all other calls | one interface, blocking or async |
| `hot_session` | aiohttp | verifiers, external engines | 64 concurrent chats: 0.24 ms each; with httpx 4.8 ms |
| `post_connections` | asyncio | all requests to our engines | equal bytes to 64 peers: 29 µs each; aiohttp 125 µs |
| `byte_connection` | standard library | ranges of weights | no copies: 1.4 GB/s, receives 2.6 times as fast as httpx |

Each library is imported with its first connection, so that short commands start without them. `post` sends one request
to a service with heartbeats, within time and size limits. `system/outside.py` has the requests to servers outside the
run.
"""

from __future__ import annotations

import http.client
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

if TYPE_CHECKING:
    import aiohttp
    import httpx

    from pipelinerl.system.post_connections import FanoutClient


#: Time limit for connecting. A live peer accepts a connection in less time, even if its response takes long.
CONNECT_S: Final = 5.0
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


def authorization(token: str | None) -> dict[str, str]:
    """Return the header with the run's bearer token; no headers if there is no token."""
    return {"authorization": f"Bearer {token}"} if token else {}


def session(
    base_url: str = "", *, token: str | None = None, timeout_s: float = 10.0, headers: Mapping[str, str] = _NO_HEADERS
) -> httpx.Client:
    """Return a blocking client that reuses connections; close it, or use it in a `with` block.

    `base_url` is the prefix of all paths. `timeout_s` limits connecting, and each wait for data from the peer.
    """
    import httpx

    return httpx.Client(**_settings(base_url, token, timeout_s, headers), trust_env=False)


def async_session(base_url: str = "", *, token: str | None = None, timeout_s: float = 10.0) -> httpx.AsyncClient:
    """Return an async client, otherwise like `session`."""
    import httpx

    return httpx.AsyncClient(**_settings(base_url, token, timeout_s, _NO_HEADERS), trust_env=False)


def hot_session(*, token: str | None, keep_alive_s: float, read_bytes: int = 2**16) -> aiohttp.ClientSession:
    """Return a client for any number of concurrent calls, each with its own deadline (`call_timeout`).

    Create and close the client in the event loop that uses it. Idle connections are kept for `keep_alive_s`, which must
    be shorter than the server's limit, so that no request is sent on a connection that the server is closing.
    `read_bytes` is the buffer size of a response.
    """
    import aiohttp

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=keep_alive_s),
        headers=authorization(token),
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=read_bytes,
        trust_env=False,
    )


def post_connections(
    *, token: str | None, keep_alive_s: float, headers: Mapping[str, str] = _NO_HEADERS
) -> FanoutClient:
    """Return a client for small concurrent requests to many peers; `keep_alive_s` is as in `hot_session`."""
    from pipelinerl.system.post_connections import FanoutClient

    return FanoutClient(headers={**headers, **authorization(token)}, keep_alive_s=keep_alive_s, connect_s=CONNECT_S)


def call_timeout(timeout_s: float, *, silence_s: float | None = None) -> aiohttp.ClientTimeout:
    """Return the timeout of one `hot_session` call. If it is infinite, for endless streams, only connecting is limited.

    With `silence_s`, the call also times out if the peer sends nothing for that long.
    """
    import aiohttp

    return aiohttp.ClientTimeout(
        total=None if math.isinf(timeout_s) else timeout_s,
        sock_connect=min(CONNECT_S, timeout_s),
        sock_read=silence_s,
    )


def byte_connection(url: str) -> http.client.HTTPConnection:
    """Return an unopened connection to the host of `url`, for callers that read from the socket into their own memory.

    The caller sets the headers (`authorization`) and the timeout of each request.
    """
    parts = urlsplit(url)
    connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return connection(parts.hostname or "", parts.port or connection.default_port)


def _settings(base_url: str, token: str | None, timeout_s: float, headers: Mapping[str, str]) -> dict[str, Any]:
    return {
        "base_url": base_url,
        "headers": {**headers, **authorization(token)},
        "timeout": timeout_s,
        "verify": _trusted(),
    }


@cache
def _trusted() -> Any:
    """Return the trusted certificates. They are cached, because reading them takes 30 ms, as long as thirty calls."""
    import httpx

    return httpx.create_ssl_context(trust_env=False)


#: Seconds for which clients keep idle connections: less than `connection.KEEP_ALIVE_S`, so that clients close them.
KEEP_ALIVE_S: Final = 30.0
_MOST_SHOWN_OF_A_REFUSAL: Final = 300


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


async def post(
    session: aiohttp.ClientSession, url: str, body: bytes, *, most_bytes: int, patience: ServicePatience
) -> tuple[int, bytes]:
    """Send a request to a `HeartbeatRoute`; return the status and the body.

    Raises `ServiceFailed`, which names the URL, if no answer comes, or its body has more than `most_bytes`.
    """
    import aiohttp

    timeout = call_timeout(patience.timeout_s, silence_s=patience.silence_s)
    headers = {"content-type": "application/json"}
    try:
        async with session.post(url, data=body, headers=headers, timeout=timeout, allow_redirects=False) as response:
            return response.status, await at_most(response, most_bytes)
    except TimeoutError as error:
        raise ServiceFailed(f"{url} has been silent for too long ({_words(error)})") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ServiceFailed(f"{url} cannot be reached or closed the connection ({_words(error)})") from None


def error_of(content: bytes) -> tuple[str, str]:
    """Return (message, code) of an error in OpenAI's format; for other content, (its beginning, "")."""
    try:
        error = msgspec.json.decode(content, type=Mapping[str, Mapping[str, str | None]])["error"]
        return str(error.get("message"))[:_MOST_SHOWN_OF_A_REFUSAL], str(error.get("code"))
    except (msgspec.DecodeError, ValueError, RecursionError, KeyError):
        return content[:80].decode(errors="replace"), ""


async def at_most(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Return the response's body. Raises `ServiceFailed` if it is larger than `most_bytes`."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > most_bytes:
            raise ServiceFailed(f"{response.url} answers with more than {most_bytes} bytes")
        parts.append(part)
    return b"".join(parts)


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
