"""Checks of the transport `pull`, which must keep the same promises as a broadcast; the kit plays the weight server."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

import httpx

from inference_contract import routes
from inference_contract.conformance.session import NotOffered, Session, checks_of, refused
from inference_contract.conformance.weight_checks import (
    check_lost,
    check_served,
    kit_trainer,
    old_weights_stay,
    updates_under_load,
)

if TYPE_CHECKING:
    from inference_contract.conformance.trainer import KitTrainer


class WeightServer:
    """A weight server whose failures the kit can trigger; it listens until its `with` block ends.

    It serves only `routes.WEIGHTS`, whole or in ranges, to requests with the token, and only over HTTP.

    Attributes:
        requests: paths of authenticated requests.
        breaks_at: byte offset at which connections are closed; None disables this.
        open: event; while it is cleared, the server delays its answers.
    """

    def __init__(self, host: str, token: str | None) -> None:
        self.token = token
        self.requests: list[str] = []
        self.breaks_at: int | None = None
        self.open = threading.Event()
        self.open.set()
        self._held: dict[str, bytes] = {}
        held = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 30.0

            def do_GET(self) -> None:
                held.answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer((host, 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{host}:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()

    def hold(
        self, trainer: KitTrainer, version: int, tag: int, *, ranges: Iterable[tuple[int, int]] | None = None
    ) -> None:
        """Serve the kit's weights number `tag` as `version`; outside the byte `ranges`, if given, serve zeros."""
        data = trainer.weights(tag).numpy().tobytes()
        held = bytearray(len(data))
        for start, end in [(0, len(data))] if ranges is None else ranges:
            held[start:end] = data[start:end]
        self._held[routes.WEIGHTS.format(epoch=trainer.epoch, version=version)] = bytes(held)

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Answer one GET."""
        if self.token is not None and handler.headers["authorization"] != f"Bearer {self.token}":
            self._send(handler, 401, b"", {})
            return
        self.requests.append(handler.path)
        data = self._held.get(handler.path)
        if data is None:
            self._send(handler, 404, b"", {})
            return
        self.open.wait(30.0)
        byte_range = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers["range"] or "")
        start = int(byte_range[1]) if byte_range else 0
        end = int(byte_range[2]) + 1 if byte_range and byte_range[2] else len(data)
        part = {"content-range": f"bytes {start}-{end - 1}/{len(data)}"} if byte_range else {}
        limit = len(data) if self.breaks_at is None else self.breaks_at
        self._send(handler, 206 if byte_range else 200, data[start:end], part, sent=max(limit - start, 0))

    @staticmethod
    def _send(
        handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str], sent: int | None = None
    ) -> None:
        handler.send_response(status)
        for name, value in {**headers, "content-length": str(len(body))}.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body if sent is None else body[:sent])
        if sent is not None and sent < len(body):
            handler.close_connection = True


def pull_is_served(session: Session) -> None:
    """Weights are fetched from the server named in PREPARE, with the token and without a group, and then served."""
    kit_trainer(session).leave()
    with WeightServer(session.host, session.token) as server:
        check_served(session, partial(_pulled, session, server))


def pull_and_broadcast_take_turns(session: Session) -> None:
    """Pulls and broadcasts may alternate; the same bytes give the same results over either transport."""
    trainer = kit_trainer(session)
    with WeightServer(session.host, session.token) as server:
        trainer.publish(23)
        before = session.greedy()
        for tag in (24, 25):
            _pulled(session, server, tag)
            assert session.greedy()[1] != before[1], "a pull after a broadcast must take effect"
        _pulled(session, server, 23)
        assert session.greedy() == before, "pulled bytes must give the same results as the same bytes from a broadcast"
        trainer.publish(24)
        assert session.greedy()[1] != before[1], "a broadcast after a pull must take effect"


def pull_tries_the_next_source(session: Session) -> None:
    """If a source is down, lacks the version or closes the connection, the engine tries the next source."""
    trainer = kit_trainer(session)
    with (
        WeightServer(session.host, session.token) as broken,
        WeightServer(session.host, session.token) as empty,
        WeightServer(session.host, session.token) as good,
    ):
        with WeightServer(session.host, session.token) as gone:
            pass
        version = trainer.next_version()
        for server in (broken, good):
            server.hold(trainer, version, 25)
        broken.breaks_at = trainer.layout.num_bytes // 2
        sources = [server.url for server in (gone, empty, broken, good)]
        _prepare(session, version, digest=trainer.digest(25), sources=sources)
        trainer.committed(version, transport="pull", digest=trainer.digest(25))
        assert good.requests, "the last source must have been requested"


def pull_of_shards_is_served(session: Session) -> None:
    """A version in two shards is fetched from two servers, which hold the bytes of one shard each, and then served."""
    trainer = kit_trainer(session)
    bucket_bytes = max(trainer.layout.num_bytes // 8, 1)
    ranges = trainer.layout.shards(2, bucket_bytes)
    with WeightServer(session.host, session.token) as first, WeightServer(session.host, session.token) as second:
        _pulled(session, first, 34)
        before = session.greedy()
        _pulled(session, first, 35)
        version = trainer.next_version()
        for server, held in zip((first, second), ranges, strict=True):
            server.hold(trainer, version, 34, ranges=held)
        shards = [[first.url], [second.url]]
        _prepare(session, version, digest=trainer.digest(34), shards=shards, bucket_bytes=bucket_bytes)
        trainer.committed(version, transport="pull", digest=trainer.digest(34))
        assert session.greedy() == before, "the bytes of two shards must give the same results as from one server"


def pull_with_wrong_bytes_is_refused(session: Session) -> None:
    """Fetched bytes that do not match the digest leave the old weights in service, and the next pull works."""
    with _pull_that_fails(session, tag=26, when="after wrong bytes") as (server, version):
        _prepare(session, version, digest="f" * 32, sources=[server.url])
        refused(_commit(session, version, digest="f" * 32), 502, code="digest_mismatch")


def broken_pull_leaves_old_weights(session: Session) -> None:
    """The engine keeps its old weights when a server dies during a pull, and can be updated again."""
    trainer = kit_trainer(session)
    with _pull_that_fails(session, tag=28, when="after half a pull") as (server, version):
        server.breaks_at = trainer.layout.num_bytes // 2
        _prepare(session, version, digest=trainer.digest(29), sources=[server.url])
        check_lost(_commit(session, version, digest=trainer.digest(29)))
        server.breaks_at = None


def aborted_pull_leaves_old_weights(session: Session) -> None:
    """Aborting a pull that waits for its server keeps the old weights, and the next pull works."""
    trainer = kit_trainer(session)
    with _pull_that_fails(session, tag=30, when="after an abort") as (server, version):
        server.open.clear()
        _prepare(session, version, digest=trainer.digest(31), sources=[server.url])
        trainer.accepted(trainer.update("abort", version), "aborted")
        server.open.set()


def pull_in_flight(session: Session) -> None:
    """Sampling continues during a pull, and an answer's version spans name the version that sampled each token."""
    trainer = kit_trainer(session)
    with WeightServer(session.host, session.token) as server:

        def send(version: int) -> None:
            server.hold(trainer, version, 33)
            _prepare(session, version, digest=trainer.digest(33), sources=[server.url])

        updates = updates_under_load(
            session,
            session.completed,
            lambda: (_pulled(session, server, 32), trainer.next_version()),
            send,
            transport="pull",
            digest=trainer.digest(33),
        )
        if any(update.spans_are_right(update.whole_choices()) for update in updates):
            return
    raise NotOffered("no sample under load was in flight while pulled weights were committed")


# --- steps -------------------------------------------------------------------------------------------------------


@contextmanager
def _pull_that_fails(session: Session, *, tag: int, when: str) -> Iterator[tuple[WeightServer, int]]:
    """Yield a server of the weights `tag + 1` and their version, whose pull must fail, so that `tag` still serves."""
    with (
        WeightServer(session.host, session.token) as server,
        old_weights_stay(session, partial(_pulled, session, server), tag=tag, when=when) as version,
    ):
        server.hold(kit_trainer(session), version, tag + 1)
        yield server, version


def _prepare(session: Session, version: int, *, digest: str, **where: Any) -> None:
    """Send PREPARE of a pull; fail if it is rejected. Raises `NotOffered` if the engine does not offer pulls."""
    trainer = kit_trainer(session)
    response = trainer.update("prepare", version, transport="pull", digest=digest, group=None, generation=None, **where)
    if response.status_code == 400 and response.json().get("error", {}).get("param") == "transport":
        raise NotOffered("the engine does not offer the transport pull")
    trainer.accepted(response, "prepared")


def _commit(session: Session, version: int, *, digest: str) -> httpx.Response:
    return kit_trainer(session).update("commit", version, transport="pull", digest=digest)


def _pulled(session: Session, server: WeightServer, tag: int) -> int:
    """Have the engine pull the kit's weights number `tag` from `server` and commit them; return their version."""
    trainer = kit_trainer(session)
    version = trainer.next_version()
    server.hold(trainer, version, tag)
    _prepare(session, version, digest=trainer.digest(tag), sources=[server.url])
    trainer.committed(version, transport="pull", digest=trainer.digest(tag))
    return version


CHECKS = checks_of(globals())
