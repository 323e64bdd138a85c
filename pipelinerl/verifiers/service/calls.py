"""`post`: sends one request to a service with heartbeats (`heartbeat_route.py`), within time and size limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

from pipelinerl.system.http_client import call_timeout

if TYPE_CHECKING:
    import aiohttp

#: Must be shorter than the server's, so that the client is the one to close idle connections.
KEEP_ALIVE_S: Final = 30.0
_MOST_SHOWN_OF_A_REFUSAL: Final = 300


@dataclass(frozen=True, slots=True)
class ServicePatience:
    """Timeouts for services, in seconds.

    Attributes:
        grace_s: time after the first failure during which a request is retried; then its answers are masked.
        silence_s: longest time without a heartbeat from a service that is working on a request.
        timeout_s: longest time until the answer.
    """

    grace_s: float = 60.0
    silence_s: float = 30.0
    timeout_s: float = 900.0


class ServiceFailed(Exception):
    """A service did not do its work; another service may do it, or the same service later."""


async def post(
    session: aiohttp.ClientSession, url: str, body: bytes, *, most_bytes: int, patience: ServicePatience
) -> tuple[int, bytes]:
    """Return the status, and the body of at most `most_bytes`.

    Raises:
        ServiceFailed: there is no answer, or it is too long; the message names the URL.
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
    """Return (message, code) of an error in OpenAI's format, or the start of any other content."""
    try:
        error = msgspec.json.decode(content, type=Mapping[str, Mapping[str, str | None]])["error"]
        return str(error.get("message"))[:_MOST_SHOWN_OF_A_REFUSAL], str(error.get("code"))
    except (msgspec.DecodeError, ValueError, RecursionError, KeyError):
        return content[:80].decode(errors="replace"), ""


async def at_most(response: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Return the body. Raises `ServiceFailed` if it is larger than `most_bytes`."""
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
