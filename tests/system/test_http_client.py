"""Tests of the HTTP clients: headers, proxies, and deadlines."""

import math
import socket
import threading
from contextlib import contextmanager

import httpx
import pytest

from pipelinerl.system import http_client
from tests.patience import PATIENCE_S

#: An address at which no server listens; it is set as the proxy, so that a call through the proxy would fail.
NOBODY = "http://127.0.0.1:9"


@contextmanager
def peer(answer=b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"):
    """Yield a server's URL and a list of the HTTP headers that it receives; with an empty `answer` it never answers."""
    heads = []
    over = threading.Event()

    def serve():
        while True:
            try:
                connected, _ = listening.accept()
            except OSError:
                return
            with connected, connected.makefile("rb") as lines:
                heads.append("".join(line.decode() for line in iter(lines.readline, b"\r\n")).lower())
                connected.sendall(answer)
                if not answer:
                    over.wait(PATIENCE_S)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}", heads
        finally:
            over.set()
            listening.shutdown(socket.SHUT_RDWR)
            serving.join(PATIENCE_S)


@pytest.fixture(autouse=True)
def proxies(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, NOBODY)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


def test_http_session_sends_its_token_and_headers_and_ignores_the_proxy_in_the_environment():
    with peer() as (url, heads), http_client.session(url, token="secret", headers={"x-who": "ada"}) as http:
        assert http.get("/status").text == "ok"
    assert heads[0].startswith("get /status ")
    assert "authorization: bearer secret\r\n" in heads[0]
    assert "x-who: ada\r\n" in heads[0]


async def test_other_http_clients_send_their_token_and_ignore_the_proxy_in_the_environment():
    with peer() as (url, heads):
        async with http_client.async_session(url, token="secret") as http:
            assert (await http.get("/status")).text == "ok"
        async with (
            http_client.hot_session(token="secret", keep_alive_s=1.0) as hot,
            hot.get(url + "/status", timeout=http_client.call_timeout(PATIENCE_S)) as answer,
        ):
            assert await answer.text() == "ok"
        connection = http_client.byte_connection(url)
        connection.timeout = PATIENCE_S
        connection.request("GET", "/weights", headers=http_client.authorization("secret"))
        assert connection.getresponse().read() == b"ok"
        connection.close()
    assert len(heads) == 3 and all("authorization: bearer secret\r\n" in head for head in heads)


def test_http_session_times_out_if_the_server_does_not_answer():
    with peer(b"") as (url, _), http_client.session(url, timeout_s=0.2) as http, pytest.raises(httpx.ReadTimeout):
        http.get("/")


def test_timeout_of_a_call_limits_the_time_to_connect_even_if_its_response_may_last_forever():
    soon, endless = http_client.call_timeout(2.0), http_client.call_timeout(math.inf)
    assert (soon.total, soon.sock_connect) == (2.0, 2.0)
    assert (endless.total, endless.sock_connect) == (None, http_client.CONNECT_S)
