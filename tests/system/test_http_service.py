"""Tests of the shared HTTP service over real HTTP: error format, sockets, startup and shutdown."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from typing import Annotated

import httpx
import pytest
from fastapi import Body, FastAPI

from pipelinerl.errors import AddressError, ModelError
from pipelinerl.system.http_service import guard, listen, refuse_in_one_shape, serve_until
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S

TOKEN = "run-token"


def application(token=TOKEN, **options):
    app = FastAPI(openapi_url=None, **options)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"state": "ready"}

    @app.post("/double")
    async def double(number: Annotated[int, Body(embed=True, le=9)]) -> int:
        return 2 * number

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("the inside of the service")

    refuse_in_one_shape(app)
    guard(app, token=token)
    return app


@pytest.fixture(scope="module")
def url():
    with in_thread(application()) as served:
        yield served


def ask(url, method, path, **rest):
    headers = {"content-type": "application/json", "authorization": f"Bearer {TOKEN}"}
    return httpx.request(method, url + path, headers=headers, trust_env=False, timeout=PATIENCE_S, **rest)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code", "param"),
    [
        ("GET", "/nothing", None, 404, "not_found", None),
        ("DELETE", "/double", None, 405, "method_not_allowed", None),
        ("POST", "/double", b"{secret", 400, "invalid_json", None),
        ("POST", "/double", b'{"number": "secret"}', 422, "invalid_request_error", "number"),
        ("POST", "/double", b'{"number": 12345678}', 422, "invalid_request_error", "number"),
        ("POST", "/double", b'["secret"]', 422, "invalid_request_error", "number"),
        ("POST", "/double", b"", 422, "invalid_request_error", "number"),
        ("POST", "/double", b"\xff\xfesecret", 400, "invalid_json", None),
        ("POST", "/double", b"[" * 100_000, 400, "invalid_json", None),
        ("GET", "/broken", None, 500, "internal_error", None),
    ],
)
def test_http_errors_have_one_format_and_do_not_repeat_the_input(url, method, path, body, status, code, param):
    answer = ask(url, method, path, content=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert not {"secret", "12345678", "inside"} & set(answer.text.replace('"', " ").split())
    if status == 405:
        assert answer.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", 70000), ("127.0.0.1", -1), ("300.1.2.3", 0), ("192.0.2.1", 0)]
)
def test_invalid_listen_addresses_are_rejected(host, port):
    with pytest.raises(AddressError, match=r"a port is a number|is not an address|cannot listen on"):
        listen(host, port)


async def test_http_service_without_a_token_does_not_serve_other_machines():
    with pytest.raises(AddressError, match=r"refusing to serve on .* without a token"):
        await serve_until(application(token=None), listen("0.0.0.0", 0))
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    over.set_result(None)
    await asyncio.wait_for(serve_until(application(), listen("0.0.0.0", 0), over=over), PATIENCE_S)


async def test_error_during_the_startup_of_a_served_application_is_raised():
    @asynccontextmanager
    async def lifespan(_):
        raise ModelError("no weights")
        yield

    with pytest.raises(ModelError, match="no weights"):
        await asyncio.wait_for(serve_until(application(lifespan=lifespan), listen("127.0.0.1", 0)), PATIENCE_S)


@pytest.mark.parametrize("ending", ["over", "cancelled", "cancelled while it closes"])
async def test_server_waits_until_the_application_has_shut_down(ending):
    """The application's shutdown is slow, and completes even if the server's task is cancelled meanwhile."""
    happened: list[str] = []
    closing = asyncio.Event()

    @asynccontextmanager
    async def lifespan(_):
        happened.append("up")
        yield
        closing.set()
        await asyncio.sleep(0.2)
        happened.append("down")

    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    listener = listen("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    serving = asyncio.create_task(serve_until(application(lifespan=lifespan), listener, over=over))
    async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as http:
        assert (await http.get(url + "/health")).status_code == 200
    assert happened == ["up"]
    if ending == "over":
        over.set_result(None)
        await asyncio.wait_for(serving, PATIENCE_S)
    else:
        if ending == "cancelled while it closes":
            over.set_result(None)
            await asyncio.wait_for(closing.wait(), PATIENCE_S)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(serving, PATIENCE_S)
    assert happened == ["up", "down"]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=PATIENCE_S)
