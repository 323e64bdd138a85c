"""HTTP clients. Processes open all HTTP connections through this module, with the run's token and with deadlines.

Proxies from the environment are ignored, since the token is only for the run's peers.

| opened by | library | for | because, measured on two cores over loopback |
|---|---|---|---|
| `session`, `async_session` | httpx | all other calls | one interface, blocking or async |
| `hot_session` | aiohttp | engines, verifiers | 64 concurrent chats: 0.24 ms each; with httpx 4.8 ms |
| `byte_connection` | standard library | ranges of weights | no copies: 1.4 GB/s, receives 2.6 times as fast as httpx |

Each library is imported with its first connection, so that short commands start without them. `responding` sends one
request of a `hot_session`, and raises Python's own errors. `system/service_client.py` has the requests to services with
heartbeats, and `system/outside.py` those to servers outside the run.
"""

from __future__ import annotations

import http.client
import math
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import aiohttp
    import httpx


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


class Disconnected(ConnectionError):
    """The server closed the connection before the response began."""


class InvalidAddress(ConnectionError):
    """A URL is no valid address of a server."""


class ResponseTooLarge(ConnectionError):
    """A response is larger than expected, so it is not from the server that was meant."""


@asynccontextmanager
async def responding(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    body: bytes | None = None,
    *,
    timeout: aiohttp.ClientTimeout,
    headers: Mapping[str, str] | None = None,
    **options: Any,
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a request of a `hot_session`, and yield its response; redirects are not followed.

    Leaving the block early closes the connection. Inside the block, too, errors of the connection are raised as:
        TimeoutError: no response, or no further part of it, within `timeout`.
        ConnectionError: the server cannot be reached, breaks off or does not speak HTTP, or the URL is invalid. Its
            subclasses are `Disconnected`, `InvalidAddress` and `ResponseTooLarge`.
    """
    import aiohttp

    try:
        async with session.request(
            method, url, data=body, headers=headers, timeout=timeout, allow_redirects=False, **options
        ) as response:
            yield response
    except aiohttp.ServerDisconnectedError:
        raise Disconnected("the server closed the connection without an answer") from None
    except aiohttp.ConnectionTimeoutError:
        raise ConnectionError("timed out connecting") from None
    except (TimeoutError, ConnectionError):
        raise
    except (aiohttp.InvalidURL, UnicodeError) as error:  # a host name that cannot be encoded is a UnicodeError
        raise InvalidAddress(f"{url} is no valid address: {error}") from None
    except (aiohttp.ClientError, OSError) as error:
        # The system's message is preferred, since aiohttp's repeats the address.
        system = getattr(error, "os_error", None)
        raise ConnectionError(
            os.strerror(system.errno) if system and system.errno else str(error) or type(error).__name__
        ) from error


async def read_at_most(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Return the response's body. Raises `ResponseTooLarge`."""
    parts: list[bytes] = []
    size = 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > most_bytes:
            raise ResponseTooLarge(f"{response.url} sends more than {most_bytes} bytes")
        parts.append(part)
    return b"".join(parts)
