"""`OutsideClient`: HTTP requests to servers outside the run, such as judges, teachers and OpenEnv servers.

Such a server may be broken or hostile, so each request is bounded:

- One deadline covers the whole request, however slowly its response arrives.
- A response has at most `MOST_BYTES`. Compressed responses are rejected, since a few bytes may unpack to gigabytes.
- Redirects are not followed, since they would send the bearer key to another address.

`PIPELINERL_PROXY` names a proxy for these requests: `http://[user:password@]host:port`. Loopback addresses and hosts in
`NO_PROXY` are requested directly. The usual proxy variables are ignored, as for connections within the run
(`system/http_client.py`).

| waits for | unblocked by | or, at the latest |
|---|---|---|
| a response | the server | the request's deadline |
"""

from __future__ import annotations

import asyncio
import email.utils
import ipaddress
import json
import os
import ssl
import time
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from pipelinerl.system.http_client import (
    InvalidAddress,
    ResponseTooLarge,
    call_timeout,
    hot_session,
    read_at_most,
    responding,
)
from pipelinerl.system.secret_variables import read_secret

if TYPE_CHECKING:
    import aiohttp

#: Environment variable with the proxy for servers outside the run.
PROXY: Final = "PIPELINERL_PROXY"
#: Maximum size of a response: several times that of the log-probs of a million tokens.
MOST_BYTES: Final = 2**26
_KEEP_ALIVE_S: Final = 15.0
#: Maximum length of an error's text, which may quote the server.
_SHOWN_CHARS: Final = 300
_READ_BYTES: Final = 10_000
#: Pauses before a retry, which double from the first to the longest.
_FIRST_PAUSE_S: Final = 0.2
_LONGEST_PAUSE_S: Final = 5.0
#: Least HTTP status of a failure of the server, and lower statuses that its state may cause: timeouts and overload.
_FAILS: Final = 500
_RETRIED: Final = frozenset({408, 409, 425, 429})
#: Maximum length of a `Retry-After` header that is read as a number of seconds.
_MOST_DIGITS: Final = 9


class OutsideResponse(NamedTuple):
    """A response; `retry_after_s` is the pause that the server requests before a retry, or 0."""

    status: int
    content: bytes
    retry_after_s: float = 0.0

    @property
    def may_be_retried(self) -> bool:
        """Return whether the server's state causes the status, such as an overload, and not the request."""
        return self.status >= _FAILS or self.status in _RETRIED

    def json(self) -> Any:
        """Decode the body. Raises `ValueError`, with one sentence, if it is not valid JSON."""
        try:
            return json.loads(self.content)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None

    def quoted(self) -> str:
        """Return the message of an error in OpenAI's form, else the beginning of the body, as one short line."""
        try:
            text = self.json()["error"]["message"].encode("utf-8", "replace").decode()
        except (ValueError, LookupError, TypeError, AttributeError):
            text = self.content[:_READ_BYTES].decode(errors="replace")
        return " ".join(text[:_READ_BYTES].split())[:_SHOWN_CHARS]


class ResponseRejected(Exception):
    """A response is too large or compressed, or the address is invalid: a retry does not help."""


class OutsideUnreachable(Exception):
    """The server cannot be reached, or has broken off; a retry may succeed."""


class OutsideClient:
    """Client of servers outside the run, in one event loop; `token` is sent as a bearer key."""

    def __init__(self, *, token: str | None = None) -> None:
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    async def get(self, url: str, *, timeout_s: float) -> OutsideResponse:
        return await self._response("GET", url, None, timeout_s)

    async def post(self, url: str, body: bytes, *, timeout_s: float) -> OutsideResponse:
        """Send a POST of a JSON body, and return the response, whatever its status.

        Raises:
            TimeoutError: no complete response within `timeout_s`.
            OutsideUnreachable: the connection cannot be made, or ends before the response does.
            ResponseRejected: the response or the URL is not acceptable.
        """
        return await self._response("POST", url, body, timeout_s)

    async def post_until(self, url: str, body: bytes, *, timeout_s: float) -> OutsideResponse:
        """Send a POST, and repeat it while the server is unreachable, or its state and not the request causes a status.

        The server may ask for a longer pause between two attempts. Raises `ResponseRejected`, or `TimeoutError` with
        the reason of the last failure if no other response has arrived within `timeout_s`.
        """
        deadline, pause_s, last = time.monotonic() + timeout_s, _FIRST_PAUSE_S, ""
        while (remaining := deadline - time.monotonic()) > 0:
            wait_s = pause_s
            try:
                response = await self.post(url, body, timeout_s=remaining)
                if not response.may_be_retried:
                    return response
                last, wait_s = f"HTTP {response.status}: {response.quoted()}", max(pause_s, response.retry_after_s)
            except OutsideUnreachable as error:
                last = str(error)
            except TimeoutError:
                last = f"it had not answered after {remaining:.1f} s"
                break
            await asyncio.sleep(min(wait_s, max(0.0, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        raise TimeoutError(last)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _response(self, method: str, url: str, body: bytes | None, timeout_s: float) -> OutsideResponse:
        if self._session is None:
            self._session = hot_session(token=self._token, keep_alive_s=_KEEP_ALIVE_S)
        headers = {"accept-encoding": "identity"} | ({"content-type": "application/json"} if body is not None else {})
        try:
            options = {"proxy": proxy_of(url), "ssl": _trusted() if url.startswith("https:") else True}
        except ValueError as error:
            raise ResponseRejected(f"{url} is no valid address: {error}") from None
        try:
            async with responding(
                self._session,
                method,
                url,
                body,
                timeout=call_timeout(timeout_s),
                headers=headers,
                auto_decompress=False,
                **options,
            ) as response:
                return await _read(response)
        except (InvalidAddress, ResponseTooLarge) as error:
            raise ResponseRejected(str(error)) from None
        except ConnectionError as error:
            raise OutsideUnreachable(" ".join(str(error).split())[:_SHOWN_CHARS]) from None
        except TimeoutError:
            raise TimeoutError(f"{url} had no complete response within {timeout_s:.1f} s") from None


async def _read(response: aiohttp.ClientResponse) -> OutsideResponse:
    packed = response.headers.get("content-encoding", "identity")
    if packed != "identity":
        raise ResponseRejected(f"{response.url} sends a compressed response ({packed[:40]}), which was not requested")
    content = await read_at_most(response, MOST_BYTES)
    if 300 <= response.status < 400:
        place = response.headers.get("location", "another address")[:200]
        content = f"it redirects to {place}, and redirects are not followed; give that address".encode()
    return OutsideResponse(response.status, content, _seconds(response.headers.get("retry-after", "")))


def _seconds(retry_after: str) -> float:
    """Convert a `Retry-After` header, a number of seconds or a date, to seconds from now; 0 if it is invalid."""
    if retry_after.isascii() and retry_after.isdecimal() and len(retry_after) <= _MOST_DIGITS:
        return float(retry_after)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0.0


def proxy_of(url: str) -> str | None:
    """Return the proxy for a URL; None if it is requested directly."""
    proxy, host = read_secret(PROXY), urlsplit(url).hostname or ""
    if not proxy or _is_loopback(host):
        return None
    direct = (each.strip().lstrip("*").lstrip(".") for each in os.environ.get("NO_PROXY", "").split(","))
    return None if any(name and f".{host}".endswith(f".{name}") for name in direct) else proxy


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@cache
def _trusted() -> ssl.SSLContext:
    """Return the certificates of certifi, and those of the system or of `SSL_CERT_FILE`, such as a proxy's own."""
    import httpx

    context = httpx.create_ssl_context(trust_env=False)
    context.load_default_certs()
    return context
