"""Every route of every server, found from the applications, against credentials that are none.

A route that somebody adds is in here without being named.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.security.servers import SERVERS, TOKEN, application

#: What needs no token: a bare liveness answer, on every server.
OPEN = {("GET", "/health"), ("HEAD", "/health")}

CREDENTIALS = [
    None, b"", b"Bearer", b"Bearer ", TOKEN.encode(), b"Bearer " + TOKEN[:-1].encode(),
    b"Bearer " + TOKEN.encode() + b"2",
    b"Bearer " + TOKEN.upper().encode(), b"Basic " + TOKEN.encode(), b"Bearer Bearer " + TOKEN.encode(),
    b"Bearer " + TOKEN.encode() + b", Bearer x", b"Bearer \xff\xfe", b"Bearer null", b"Token " + TOKEN.encode(),
    b"Bearer" + TOKEN.encode(), b"Bearer\t" + TOKEN.encode(), b"Bearer *",
]  # fmt: skip


def routes(app: Any) -> Iterator[tuple[str, str]]:
    """Each method and path that the application answers, parameters filled in."""
    for route in app.routes:
        for method in sorted(route.methods):
            yield method, re.sub(r"{[^}]*}", "1", route.path)


@pytest.fixture(params=SERVERS)
def app(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return application(request.param, tmp_path)


def client(app: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://server")


async def status(
    http: httpx.AsyncClient, method: str, path: str, credential: bytes | None, *, patience_s: float = PATIENCE_S
) -> int | None:
    """None: it was let in, and waits for something."""
    headers = [(b"content-type", b"application/json")]
    if credential is not None:
        headers.append((b"authorization", credential))
    try:
        async with asyncio.timeout(patience_s):
            return (await http.request(method, path, headers=headers, content=b"[]")).status_code
    except TimeoutError:
        return None


async def test_no_route_but_liveness_lets_anybody_in(app: Any) -> None:
    asked = 0
    async with client(app) as http:
        for method, path in routes(app):
            for credential in CREDENTIALS:
                given = await status(http, method, path, credential)
                allowed = (method, path) in OPEN
                assert (given in (200, 405)) if allowed else (given == 401), (method, path, credential)
                asked += 1
    assert asked >= 4 * len(CREDENTIALS), "the routes were found"


@pytest.mark.parametrize("spelling", ["Bearer {}", "bearer {}", "BEARER {}", "Bearer  {}"])
async def test_the_token_opens_every_route_however_the_scheme_is_spelt(app: Any, spelling: str) -> None:
    async with client(app) as http:
        for method, path in routes(app):
            answer = await status(http, method, path, spelling.format(TOKEN).encode(), patience_s=0.3)
            assert answer != 401, (method, path)


async def test_no_spelling_of_the_open_path_opens_another(app: Any) -> None:
    async with client(app) as http:
        for path in ("/health/", "//health", "/health/../metrics", "/HEALTH", "/health;x", "/health%2f", "/health%00"):
            assert await status(http, "GET", path, None) == 401, path


async def test_there_are_no_pages_that_describe_the_server(app: Any) -> None:
    async with client(app) as http:
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert await status(http, "GET", path, TOKEN.encode()) == 401
            assert await status(http, "GET", path, b"Bearer " + TOKEN.encode()) == 404
