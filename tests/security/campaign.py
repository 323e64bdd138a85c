"""Fuzzing campaigns, which send a server many random requests over real connections and report what went wrong."""

from __future__ import annotations

import asyncio
import io
import json
import resource
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

import aiohttp

from tests.fakes.served import as_process
from tests.security.fuzzer import requests
from tests.security.servers import TOKEN, application

#: Error codes whose HTTP status is 500 or more but which are no bugs of the server: they report that a third party
#: failed or that the server is shutting down.
HONEST: Final = frozenset({"dirty", "engine_stopped", "peer_lost", "deadline_exceeded", "digest_mismatch", "failed"})
#: Client timeout in seconds. A request without an answer after this time counts as waiting for other clients.
_WAITS_FOR_OTHERS_S: Final = 1.0
#: The largest body, in bytes, for which the client always gets an answer. The server may reject a longer body and
#: close the connection before it has read the whole body.
_MOST_UNREAD: Final = 65536
#: Number of concurrent clients, each with one connection. They take their requests from one seeded stream.
_CLIENTS: Final = 4


@dataclass(slots=True)
class Findings:
    """Results of a campaign.

    `stall_s` is the longest stall of the server (see `fuzzed_server`), and `stalled_by` the requests in progress then.
    `grown_bytes` is how much the server's memory grew after the first quarter of requests.
    """

    requests: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    waited: int = 0
    failures: list[str] = field(default_factory=list)
    stall_s: float = 0.0
    stalled_by: list[str] = field(default_factory=list)
    grown_bytes: int = 0
    seconds: float = 0.0

    def __str__(self):
        counted = ", ".join(f"{count} × {status}" for status, count in sorted(self.statuses.items()))
        return (
            f"{self.requests} requests in {self.seconds:.0f} s: {counted}; {self.waited} waited for others; "
            f"{len(self.failures)} failures; longest stall {self.stall_s * 1e3:.0f} ms; "
            f"{self.grown_bytes / 2**20:+.1f} MiB"
        )


async def campaign(server, directory, *, seed, count):
    """Send `count` fuzzed requests to a server, one of `FUZZED`, in its own process."""
    for name in ("server", "routes"):
        (directory / name).mkdir()
    with as_process("tests.security.fuzzed_server", server, str(directory / "server")) as (url, process):
        stream, began = requests(seed, application(server, directory / "routes"), TOKEN), time.monotonic()
        clients = _Clients(url, stream)
        await clients.send(count // 4)
        settled = _resident_bytes(process.pid)
        await clients.send(count - count // 4)
        found = clients.found
        found.grown_bytes = _resident_bytes(process.pid) - settled
        found.seconds = time.monotonic() - began
        found.stall_s, stalled, resumed = json.loads((directory / "server" / "stall").read_text())
        found.stalled_by = [words for words, sent, ended in clients.sent if sent < resumed and ended > stalled]
    return found


@final
class _Clients:
    def __init__(self, url, stream):
        self.found = Findings()
        self._url = url
        self._stream = stream
        self.sent = deque(maxlen=100_000)
        """Each request in words, with the times at which it was sent and answered."""

    async def send(self, count):
        """Send `count` more requests; each client waits for the response before it sends its next request."""
        until, patience = self.found.requests + count, aiohttp.ClientTimeout(total=_WAITS_FOR_OTHERS_S)
        connections = aiohttp.TCPConnector(keepalive_timeout=60.0)
        async with aiohttp.ClientSession(connector=connections, timeout=patience, trust_env=False) as http:
            await asyncio.gather(*(self._client(http, until) for _ in range(_CLIENTS)))

    async def _client(self, http, until):
        found = self.found
        while found.requests < until:
            found.requests += 1
            method, path, headers, content = next(self._stream)
            words, began = f"{method} {path} {headers} {len(content)} bytes {content[:300]!r}", time.monotonic()
            try:
                status, body = await self._answer(http, method, path, headers, content)
            except TimeoutError:
                found.waited += 1
            except aiohttp.ClientError as error:
                if len(content) <= _MOST_UNREAD or not isinstance(error, OSError):
                    found.failures.append(f"no answer to {words}: {error!r}")
            else:
                found.statuses[status] += 1
                if status >= 500 and _code(body) not in HONEST:
                    found.failures.append(f"{status} to {words}: {body[:500]!r}")
            self.sent.append((words, began, time.monotonic()))

    async def _answer(self, http, method, path, headers, content):
        """Return the response; retry once if the server has just closed the kept-alive connection."""
        for is_last in (False, True):
            body = io.BytesIO(content)  # sent in pieces: large bytes would block the event loop
            try:
                async with http.request(method, self._url + path, headers=headers, data=body) as answer:
                    return answer.status, await answer.read()
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                if is_last:
                    raise
        raise AssertionError("the last attempt returns or raises")


def _code(body):
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


def _resident_bytes(pid):
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
