"""The one place where HTTP connections are opened, so that each carries the run's token, goes past every proxy that the
environment names (the token is for the run's peers alone), and ends its calls by a deadline.

| opened by | library | for | because, measured on two cores over loopback |
|---|---|---|---|
| `session`, `async_session` | httpx | every call that is not below | one interface, blocking or not |
| `hot_session` | aiohttp | verifiers, others' engines | 64 chats at a time: 0.24 ms a chat; by httpx 4.8 ms |
| `post_connections` | asyncio | all that engines are asked | the same bytes to 64: 29 µs a call; by aiohttp 125 µs |
| `byte_connection` | the standard library's | ranges of weights | see below |

A parameter server's bytes go between a socket and memory that is there already, 8 MiB at a time: 1.4 GB/s both ways,
3.3 GB per second of processor received. httpx hands out copies of 64 KiB: it takes 2.6 times as long to receive and
1.4 times to send, and aiohttp does not block, as the threads that push and pull do.

Each library is imported by the first who opens a connection with it: a command line needs no aiohttp.
"""

from __future__ import annotations

import http.client
import math
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import aiohttp
    import httpx

    from pipelinerl.system.post_connections import FanoutClient

#: A peer that is there accepts a connection within this time, however long its answer takes.
CONNECT_S: Final = 5.0
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})


def authorization(token: str | None) -> dict[str, str]:
    """The header that carries the run's bearer token; no header without a token."""
    return {"authorization": f"Bearer {token}"} if token else {}


def session(
    base_url: str = "", *, token: str | None = None, timeout_s: float = 10.0, headers: Mapping[str, str] = _NO_HEADERS
) -> httpx.Client:
    """Blocking calls to `base_url`, whose connections are kept; close it, or use it in a `with` block.

    Args:
        base_url: goes before a path that is asked for; empty where calls give whole URLs.
        token: the run's bearer token.
        timeout_s: longest silence, while connecting and while the peer sends nothing.
        headers: further headers of every call.
    """
    import httpx

    return httpx.Client(**_settings(base_url, token, timeout_s, headers), trust_env=False)


def async_session(
    base_url: str = "", *, token: str | None = None, timeout_s: float = 10.0, headers: Mapping[str, str] = _NO_HEADERS
) -> httpx.AsyncClient:
    """What `session` is, for an event loop."""
    import httpx

    return httpx.AsyncClient(**_settings(base_url, token, timeout_s, headers), trust_env=False)


def hot_session(
    *, token: str | None, keep_alive_s: float, headers: Mapping[str, str] = _NO_HEADERS, read_bytes: int = 2**16
) -> aiohttp.ClientSession:
    """As many calls at a time as there are, each with a deadline of its own (`call_timeout`).

    Made in the event loop that uses it, and closed there.

    Args:
        token: the run's bearer token.
        keep_alive_s: how long an idle connection is kept; shorter than the server keeps it, so that it is the client
            that closes and no call meets a connection that is being closed.
        headers: further headers of every call.
        read_bytes: how much of an answer is buffered.
    """
    import aiohttp

    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=keep_alive_s),
        headers={**headers, **authorization(token)},
        cookie_jar=aiohttp.DummyCookieJar(),
        read_bufsize=read_bytes,
        trust_env=False,
    )


def post_connections(
    *, token: str | None, keep_alive_s: float, headers: Mapping[str, str] = _NO_HEADERS
) -> FanoutClient:
    """Small requests to many peers at once, each with a deadline of its own; the arguments are `hot_session`'s."""
    from pipelinerl.system.post_connections import FanoutClient

    return FanoutClient(headers={**headers, **authorization(token)}, keep_alive_s=keep_alive_s, connect_s=CONNECT_S)


def call_timeout(timeout_s: float, *, silence_s: float | None = None) -> aiohttp.ClientTimeout:
    """The deadline of one call of a `hot_session`; with infinity, a stream without end over a prompt connection.

    A peer that sends nothing for `silence_s` has missed it, too.
    """
    import aiohttp

    return aiohttp.ClientTimeout(
        total=None if math.isinf(timeout_s) else timeout_s,
        sock_connect=min(CONNECT_S, timeout_s),
        sock_read=silence_s,
    )


def byte_connection(url: str) -> http.client.HTTPConnection:
    """One connection to the host of `url`, not made yet, whose socket the caller reads into memory of its own.

    Whoever calls gives each request its headers (`authorization`) and its time.
    """
    parts = urlsplit(url)
    if parts.scheme == "https":
        return http.client.HTTPSConnection(parts.hostname or "", parts.port or 443)
    return http.client.HTTPConnection(parts.hostname or "", parts.port or 80)


def _settings(base_url: str, token: str | None, timeout_s: float, headers: Mapping[str, str]) -> dict[str, Any]:
    return {
        "base_url": base_url,
        "headers": {**headers, **authorization(token)},
        "timeout": timeout_s,
        "verify": _trusted(),
    }


@cache
def _trusted() -> Any:
    """The certificates that are believed: read once, for that takes 30 ms, as long as thirty calls."""
    import httpx

    return httpx.create_ssl_context(trust_env=False)
