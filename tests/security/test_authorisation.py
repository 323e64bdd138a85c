"""Every route of every server rejects invalid credentials; the routes are read from the applications."""

import asyncio
import re

import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.security.servers import SERVERS, TOKEN, application

#: Routes that need no token: only `/health`, which reveals nothing but that the server is up.
OPEN = {("GET", "/health"), ("HEAD", "/health")}

CREDENTIALS = [
    None, b"", b"Bearer", b"Bearer ", TOKEN.encode(), b"Bearer " + TOKEN[:-1].encode(),
    b"Bearer " + TOKEN.encode() + b"2",
    b"Bearer " + TOKEN.upper().encode(), b"Basic " + TOKEN.encode(), b"Bearer Bearer " + TOKEN.encode(),
    b"Bearer " + TOKEN.encode() + b", Bearer x", b"Bearer \xff\xfe", b"Bearer null", b"Token " + TOKEN.encode(),
    b"Bearer" + TOKEN.encode(), b"Bearer\t" + TOKEN.encode(), b"Bearer *",
]  # fmt: skip


def routes(app):
    """Yield each method and path of the application, with path parameters filled in."""
    for route in app.routes:
        for method in sorted(route.methods):
            yield method, re.sub(r"{[^}]*}", "1", route.path)


@pytest.fixture(params=SERVERS)
def app(request, tmp_path):
    return application(request.param, tmp_path)


def client(app):
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://server")


async def status(http, method, path, credential, *, patience_s=PATIENCE_S):
    """Return the response's status; None means a timeout: the request was authorised and is waiting for something."""
    headers = [(b"content-type", b"application/json")]
    if credential is not None:
        headers.append((b"authorization", credential))
    try:
        async with asyncio.timeout(patience_s):
            return (await http.request(method, path, headers=headers, content=b"[]")).status_code
    except TimeoutError:
        return None


async def test_every_route_of_every_server_except_health_requires_the_token(app):
    request_count = 0
    async with client(app) as http:
        for method, path in routes(app):
            for credential in CREDENTIALS:
                given = await status(http, method, path, credential)
                allowed = (method, path) in OPEN
                assert (given in (200, 405)) if allowed else (given == 401), (method, path, credential)
                request_count += 1
    assert request_count >= 4 * len(CREDENTIALS), "the routes were found"


@pytest.mark.parametrize("spelling", ["Bearer {}", "bearer {}", "BEARER {}", "Bearer  {}"])
async def test_token_is_accepted_on_every_route_however_the_word_bearer_is_capitalised(app, spelling):
    credential, every = spelling.format(TOKEN).encode(), list(routes(app))
    async with client(app) as http:
        answers = await asyncio.gather(*(status(http, *route, credential, patience_s=0.3) for route in every))
    assert 401 not in answers, dict(zip(every, answers, strict=True))


async def test_other_spellings_of_the_health_path_need_a_token(app):
    async with client(app) as http:
        for path in ("/health/", "//health", "/health/../metrics", "/HEALTH", "/health;x", "/health%2f", "/health%00"):
            assert await status(http, "GET", path, None) == 401, path


async def test_no_server_serves_its_api_documentation(app):
    async with client(app) as http:
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert await status(http, "GET", path, TOKEN.encode()) == 401
            assert await status(http, "GET", path, b"Bearer " + TOKEN.encode()) == 404
