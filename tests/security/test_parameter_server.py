"""A parameter server rejects hostile requests that have a valid token, and never answers with a 5xx server error."""

import time
from contextlib import suppress

import httpx
import pytest

from pipelinerl.plugins.parameter_server import server
from tests.fakes.parameter_server import TOKEN, application
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S, SOON_S
from tests.security.raw_http import connect, say, statuses

LAYOUT = {"parameters": [{"name": "w", "shape": [1000], "dtype": "float32"}]}


@pytest.fixture(scope="module")
def url():
    with in_thread(application()) as served:
        announced = ask(served, "POST", "/versions", json={"epoch": 1, "version": 1, "layout": LAYOUT})
        assert announced.status_code == 200
        yield served


def ask(url, method, path, headers=None, **rest):
    known = {"authorization": f"Bearer {TOKEN}"} | (headers or {})
    return httpx.request(method, url + path, headers=known, trust_env=False, timeout=PATIENCE_S, **rest)


@pytest.mark.parametrize(
    "named", ["bytes 0-{}/4000", "bytes {}-{}/4000", "bytes {}-1/4000", "bytes -{}/4000", "{}", "bytes \u0661-2/4000"]
)
def test_http_byte_range_with_five_thousand_digits_is_rejected(url, named):
    header = named.replace("{}", "9" * 5000).encode()
    for method, name in (("PUT", "content-range"), ("GET", "range")):
        answer = ask(url, method, "/weights/1/1", {name: header}, content=b"x" if method == "PUT" else b"")
        assert 400 <= answer.status_code < 500 and answer.json()["error"]["message"]


@pytest.mark.parametrize("key", ["9" * 5000, "1e9", "-1", "\u0661", "1_0"])
def test_weight_version_that_is_not_a_number_is_rejected(url, key):
    for path in (f"/weights/{key}/1", f"/weights/1/{key}", f"/versions/1/{key}"):
        assert 400 <= ask(url, "GET", path).status_code < 500


@pytest.mark.parametrize(
    "source",
    ["http://[::1", "http://host:99999", "http://" + "a" * 64 + ".lab", "http://a..b", "http://host:0", "http://[x]"],
)
def test_copying_weights_from_a_host_that_cannot_be_resolved_is_rejected(url, source):
    order = {"source": source, "digest": "0", "whole": "0", "timeout_s": 1.0}
    answer = ask(url, "POST", "/versions/1/1/copy", json=order)
    assert answer.status_code == 422 and answer.json()["error"]["param"] == "source"


def test_weight_upload_that_sends_single_bytes_is_ended_at_the_time_limit(url, monkeypatch):
    """Otherwise a client that sends one byte just before each timeout would occupy a version's memory forever."""
    monkeypatch.setattr(server, "BODY_TIMEOUT_S", 0.6)
    head = f"PUT /weights/1/1 HTTP/1.1\r\nhost: x\r\ncontent-length: 4000\r\nauthorization: Bearer {TOKEN}\r\n\r\n"
    began = time.monotonic()
    with connect(url) as trickling:
        say(trickling, head.encode())
        trickling.settimeout(0.3)
        response = b""
        while not response and time.monotonic() - began < PATIENCE_S:
            say(trickling, b"x")
            with suppress(TimeoutError):
                response = trickling.recv(65536)
    assert statuses(response) == [504] and time.monotonic() - began < SOON_S
