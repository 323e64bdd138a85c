"""Requests to servers outside the run: deadline, size limit, redirects, pauses and the proxy."""

import asyncio
import base64
import email.utils
import gzip
import time

import pytest

from pipelinerl.system import outside
from pipelinerl.system.outside import (
    PROXY,
    OutsideClient,
    OutsideResponse,
    OutsideUnreachable,
    ResponseRejected,
    proxy_of,
)
from tests.fakes.raw_server import raw_server, response, sending
from tests.patience import PATIENCE_S


async def answer_of(handler, *, timeout_s=PATIENCE_S):
    client = OutsideClient(token="secret")
    async with raw_server(handler) as url:
        try:
            return await client.post(f"{url}/v1/x", b"{}", timeout_s=timeout_s)
        finally:
            await client.close()


def forever(first, part, pause_s):
    async def send(head, writer):
        writer.write(first)
        while True:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)

    return send


@pytest.mark.parametrize(
    "handler",
    [
        forever(b"HTTP/1.1 200 x\r\ncontent-length: 999\r\n\r\n", b"x", 0.01),
        forever(b"", b"HTTP/1.1 100 Continue\r\n\r\n", 0.01),
        forever(b"HTTP/1.1 200 x\r\n", b"a: b\r\n", 0.01),
        forever(b"", b"", 0.01),
    ],
    ids=["slow body", "100 Continue", "slow headers", "silence"],
)
async def test_deadline_covers_the_whole_request_however_slowly_the_response_arrives(handler):
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"had no complete response within 0\.2 s"):
        await answer_of(handler, timeout_s=0.2)
    assert time.monotonic() - began < PATIENCE_S / 2


@pytest.mark.parametrize("first", [b"content-length: 9999999999999", b"transfer-encoding: chunked"])
async def test_response_beyond_the_size_limit_is_rejected(first, monkeypatch):
    monkeypatch.setattr(outside, "MOST_BYTES", 2**20)
    with pytest.raises(ResponseRejected, match=r"http://127.* sends more than 1048576 bytes"):
        await answer_of(forever(b"HTTP/1.1 200 x\r\n" + first + b"\r\n\r\n", b"10000\r\n" + bytes(2**16) + b"\r\n", 0))


async def test_compressed_response_is_rejected_without_unpacking_it():
    bomb = gzip.compress(bytes(2**20))
    with pytest.raises(ResponseRejected, match=r"sends a compressed response \(gzip\)"):
        await answer_of(sending(response(bomb, content_encoding="gzip")))


async def test_redirect_is_not_followed_so_that_the_key_stays_with_its_server():
    heads = []

    async def note(head, writer):
        heads.append(head)
        writer.write(response(b""))

    async with raw_server(note) as other:
        redirected = await answer_of(sending(response(b"", status=307, location=other)))
    assert redirected.status == 307 and f"it redirects to {other}" in redirected.content.decode()
    assert not heads


@pytest.mark.parametrize(
    "content",
    [b"\xff\xff\r\n\r\n", b"HTTP/1.1 200 x\r\ncontent-length: -1\r\n\r\n", b"HTTP/1.1 200 x\r\n" + b"a" * 10**6],
)
async def test_response_that_is_no_http_is_an_outage(content):
    with pytest.raises(OutsideUnreachable):
        await answer_of(sending(content))


async def test_unreachable_and_invalid_addresses_have_errors_of_their_own():
    client = OutsideClient()
    with pytest.raises(OutsideUnreachable, match="refused"):
        await client.get("http://127.0.0.1:9", timeout_s=PATIENCE_S)
    for url in ("http://", "http://[", "http://a b/"):
        with pytest.raises((ResponseRejected, OutsideUnreachable)):
            await client.get(url, timeout_s=PATIENCE_S)
    await client.close()


@pytest.mark.parametrize(
    ("header", "least", "most"),
    [
        ("7", 7, 7),
        (lambda: email.utils.formatdate(time.time() + 100, usegmt=True), 90, 101),
        (lambda: email.utils.formatdate(time.time() - 100, usegmt=True), 0, 0),
        ("-3", 0, 0),
        ("1e999", 0, 0),
        ("9" * 400, 0, 0),
        ("soon", 0, 0),
        ("²", 0, 0),
    ],
)
async def test_requested_pause_is_read_as_seconds_or_as_a_date(header, least, most):
    text = header if isinstance(header, str) else header()
    answer = await answer_of(sending(response(b"", status=429, retry_after=text)))
    assert least <= answer.retry_after_s <= most and answer.may_be_retried
    assert OutsideResponse(529, b"").may_be_retried and not OutsideResponse(400, b"").may_be_retried


async def test_outside_requests_go_through_the_named_proxy_and_loopback_does_not(monkeypatch):
    heads = []

    async def note(head, writer):
        heads.append(head)
        writer.write(response(b"ok", status=403 if head.startswith(b"CONNECT") else 200))

    client = OutsideClient(token="key")
    async with raw_server(note) as proxy:
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
        monkeypatch.setenv(PROXY, proxy.replace("http://", "http://ada:pw@"))
        assert (await client.get("http://judge.example/v1/models", timeout_s=PATIENCE_S)).content == b"ok"
        with pytest.raises(OutsideUnreachable):  # this proxy opens no tunnel
            await client.post("https://judge.example/v1/x", b"{}", timeout_s=PATIENCE_S)
        plain, tunnel = heads[:2]
        assert plain.startswith(b"GET http://judge.example/v1/models ") and b"Bearer key" in plain
        assert tunnel.startswith(b"CONNECT judge.example:443 ") and b"Bearer key" not in tunnel
        assert all(base64.b64encode(b"ada:pw") in head for head in (plain, tunnel))
        monkeypatch.setenv("NO_PROXY", "other.example, .inside.example")
        assert proxy_of("http://inside.example") is proxy_of("https://a.inside.example:8000/v1") is None
        assert proxy_of("http://127.0.0.1:9") is proxy_of("http://localhost") is proxy_of("http://[::1]:7") is None
        own = proxy.replace("//", "//ada:pw@")
        assert proxy_of("http://outside.example") == proxy_of("http://notinside.example") == own
    await client.close()
