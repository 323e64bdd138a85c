"""Attacks with raw bytes on an open port, such as endless or slow HTTP headers and wrong content lengths."""

import time

import httpx
import pytest

from pipelinerl.system import connection, http_service
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S, SOON_S
from tests.security.raw_http import code, connect, exchange, hear, say, statuses
from tests.security.servers import SERVERS, TOKEN, application

HOST = b"host: 127.0.0.1\r\n"
ALIVE = b"GET /health HTTP/1.1\r\n" + HOST
LAST = ALIVE + b"connection: close\r\n\r\n"
KNOWN = b"authorization: Bearer " + TOKEN.encode() + b"\r\n"
JSON = b"content-type: application/json\r\n"


@pytest.fixture(scope="module", params=SERVERS)
def url(request, tmp_path_factory):
    with in_thread(application(request.param, tmp_path_factory.mktemp("run"))) as served:
        yield served


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with in_thread(application("engine", tmp_path_factory.mktemp("run"))) as served:
        yield served


def answers(url):
    began = time.monotonic()
    assert httpx.get(url + "/health", trust_env=False, timeout=PATIENCE_S).status_code == 200
    assert time.monotonic() - began < SOON_S


@pytest.mark.parametrize(
    "head",
    [
        ALIVE + b"x: " + b"a" * 2**25,
        ALIVE + b"x: a\r\n" * 2**21,
        b"GET /" + b"a" * 2**24,
        ALIVE + b"x" * 2**24,
        b"\r\n" * 2**20,
    ],
    ids=["one long value", "many headers", "a long target", "a long name", "blank lines"],
)
def test_endless_http_headers_are_rejected_and_block_no_other_client(url, head):
    began = time.monotonic()
    response = exchange(url, head)
    assert time.monotonic() - began < SOON_S
    assert statuses(response) in ([431], []), "none: the reset that follows has overtaken the answer"
    answers(url)


def test_http_headers_over_the_size_limit_get_status_431(url):
    response = exchange(url, ALIVE + b"x: " + b"a" * connection.MAX_HEAD_BYTES)
    assert statuses(response) == [431] and code(response) == "headers_too_large"
    assert statuses(exchange(url, ALIVE + b"x: " + b"a" * 16_000 + b"\r\nconnection: close\r\n\r\n")) == [200]


@pytest.mark.parametrize("begun", [b"", b"\r\n", b"G", ALIVE, ALIVE + b"x: y\r\n"])
def test_unfinished_http_headers_time_out(url, begun, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.6)
    response = exchange(url, begun)
    assert statuses(response) == ([408] if begun.strip() else [])


def test_http_headers_sent_slowly_byte_by_byte_time_out(engine, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)
    began = time.monotonic()
    with connect(engine) as slow:
        for byte in ALIVE + b"x: y\r\n" * 100:
            say(slow, bytes([byte]))
            time.sleep(0.01)
            if time.monotonic() - began > 1.0:
                break
        assert statuses(hear(slow)) == [408]


def test_blank_lines_from_a_client_do_not_keep_an_idle_connection_open(engine, monkeypatch):
    monkeypatch.setattr(connection, "KEEP_ALIVE_S", 0.3)
    with connect(engine) as idle:
        say(idle, ALIVE + b"\r\n")
        for _ in range(5):
            time.sleep(0.1)
            say(idle, b"\r\n")
        assert statuses(hear(idle)) == [200]


def test_timeout_for_http_headers_does_not_apply_while_a_request_runs(engine, monkeypatch):
    """A request may run longer than this timeout, even if the client has begun to send its next request's headers."""
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.2)
    body = b'{"messages": [{"role": "user", "content": "x"}], "n": 8, "max_tokens": 180, "seed": 1}'
    with connect(engine) as asking:
        size = str(len(body)).encode()
        say(asking, b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + KNOWN + JSON + b"content-length: " + size)
        say(asking, b"\r\n\r\n" + body + b"GET /hea")
        assert statuses(hear(asking)) == [200, 408]


def test_connection_on_which_a_rejected_request_sends_an_endless_body_is_closed(url, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)
    with connect(url) as stranger:
        say(stranger, b"POST /versions HTTP/1.1\r\n" + HOST + JSON + b"content-length: 1000000000\r\n\r\n")
        began = time.monotonic()
        while time.monotonic() - began < PATIENCE_S:
            try:
                stranger.sendall(b" " * 1000)
            except OSError:
                break
            time.sleep(0.05)
        assert time.monotonic() - began < SOON_S


def test_connections_over_the_limit_are_rejected_and_open_connections_keep_working(engine, monkeypatch):
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 8)
    held = [connect(engine) for _ in range(8)]
    try:
        held[0].sendall(ALIVE + b"\r\n")
        assert held[0].recv(65536).startswith(b"HTTP/1.1 200")
        response = exchange(engine, LAST)
        assert statuses(response) == [503] and code(response) == "too_many_connections"
        held[0].sendall(LAST)
        assert statuses(hear(held[0])) == [200]
    finally:
        for each in held:
            each.close()
    time.sleep(0.2)
    answers(engine)


CHUNKED = b"transfer-encoding: chunked\r\n"
VERSIONS = b"POST /versions HTTP/1.1\r\n" + HOST + KNOWN + JSON


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (VERSIONS + CHUNKED + b"content-length: 5\r\n\r\n0\r\n\r\n" + LAST, [400]),
        (VERSIONS + b"content-length: 5\r\ncontent-length: 6\r\n\r\n12345" + LAST, [400]),
        (VERSIONS + b"content-length: -1\r\n\r\n" + LAST, [400]),
        (VERSIONS + b"content-length: " + b"9" * 40 + b"\r\n\r\n", [400]),
        (VERSIONS + b"content-length : 0\r\n\r\n" + LAST, [400]),
        (VERSIONS + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n" + LAST, [400]),
        (VERSIONS + CHUNKED + b"\r\nfffffffffffffffff\r\n", [400]),
        (b"GET /health HTTP/1.1\r\n" + HOST + HOST + b"connection: close\r\n\r\n", [400]),
        (b"GET /versions HTTP/1.1\r\n" + HOST + KNOWN + KNOWN + b"connection: close\r\n\r\n", [400]),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", [400]),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", [400]),
        (ALIVE + b"\r\n" + ALIVE + b"\r\n" + LAST, [200, 200, 200]),
    ],
    ids=[
        "two framings", "two lengths", "a negative length", "a length of 40 digits", "a space before the colon",
        "an unsupported framing", "a chunk of 2**68 bytes", "two hosts", "two tokens", "TLS", "HTTP/2", "pipelined",
    ],
)  # fmt: skip
def test_http_requests_that_can_be_parsed_in_two_ways_are_rejected(url, request_, expected):
    assert [status for status in statuses(exchange(url, request_)) if status != 404] == expected


def test_trailer_of_a_chunked_http_request_is_not_treated_as_a_header(engine):
    """Otherwise a client could send a token, or a second host, in the trailer after the headers were checked."""
    trailed = VERSIONS.replace(KNOWN, b"").replace(b"/versions", b"/v1/chat/completions") + CHUNKED
    with connect(engine) as stranger:
        say(stranger, trailed + b"\r\n2\r\n{}\r\n0\r\n" + KNOWN + b"\r\n" + LAST)
        assert statuses(hear(stranger)) == [401, 200]


def test_endless_trailer_of_a_chunked_http_request_is_rejected(engine):
    began = time.monotonic()
    response = exchange(engine, VERSIONS + CHUNKED + b"\r\n2\r\n{}\r\n0\r\nx: " + b"a" * 2**25)
    assert time.monotonic() - began < SOON_S and set(statuses(response)) <= {404, 431}
    answers(engine)


@pytest.mark.parametrize(
    ("path", "server"),
    [
        ("/v1/chat/completions", "engine"),
        ("/engines", "controller"),
        ("/versions", "parameter server"),
        ("/verify", "verifier"),
        ("/work", "oubliette"),
        ("/api/stop", "page"),
    ],
)
class TestBodies:
    """Every server has the same limits on request bodies."""

    @pytest.fixture
    def served(self, server, tmp_path, monkeypatch):
        monkeypatch.setattr(http_service, "MAX_BODY_BYTES", 1000)
        monkeypatch.setattr(http_service, "BODY_TIMEOUT_S", 0.3)
        with in_thread(application(server, tmp_path)) as url:
            yield url

    @pytest.mark.parametrize(
        ("body", "status", "code_"),
        [
            (b"content-length: 1001\r\n\r\n", 413, "body_too_large"),
            (CHUNKED + b"\r\n3e9\r\n" + b" " * 1001 + b"\r\n0\r\n\r\n", 413, "body_too_large"),
            (b"content-length: 900\r\n\r\n{", 408, "body_too_slow"),
            (CHUNKED + b"\r\n5\r\n{", 408, "body_too_slow"),
            (b"content-encoding: gzip\r\ncontent-length: 3\r\n\r\n\x1f\x8b\x08", 415, "compressed"),
        ],
    )
    def test_request_body_that_is_too_large_too_slow_or_compressed_is_rejected(self, served, path, body, status, code_):
        head = f"POST {path} HTTP/1.1\r\n".encode() + HOST + KNOWN + JSON + b"connection: close\r\n"
        response = exchange(served, head + body)
        assert statuses(response) == [status] and code(response) == code_
