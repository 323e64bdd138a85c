"""Checks of the transport `pull`, which must keep the same promises as a broadcast; the kit plays the weight server."""

from __future__ import annotations

import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self, final

from inference_contract import routes
from inference_contract.conformance.chat_checks import check_columns
from inference_contract.conformance.session import Load, NotOffered, Session, refused
from inference_contract.conformance.weight_checks import LoadedUpdate, kit_trainer


@final
class WeightServer:
    """A weight server whose failures the kit can trigger; it listens until its `with` block ends.

    It serves only `routes.WEIGHTS`, whole or in ranges, to requests with the token; it has no shared memory.

    Attributes:
        requests: paths of authenticated requests.
        breaks_at: byte offset at which connections are closed; None disables this.
        open: event that must be set before the server answers.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()

    def hold(self, epoch: int, version: int, data: bytes) -> None:
        """Serve `data` as the weights of this epoch and version."""
        self._held[routes.WEIGHTS.format(epoch=epoch, version=version)] = data

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
    trainer = kit_trainer(session)
    trainer.leave()
    with WeightServer(session.host, session.token) as server:
        _pulled(session, server, tag=21)
        before = session.greedy()
        version = _pulled(session, server, tag=22)
        card, health = session.card(), session.health()
        assert (card.epoch, card.model_version) == (trainer.epoch, version), "/v1/models must name the new version"
        assert health.model_version == version, "/health must name the new version"
        assert session.greedy()[1] != before[1], "other weights must give other log-probs: the pull had no effect"
        for choice in session.chat(n=2).choices:
            check_columns(choice, versions={version})
        _pulled(session, server, tag=21)
        assert session.greedy() == before, "the same bytes again must give the same greedy sample and log-probs"


def pull_and_broadcast_take_turns(session: Session) -> None:
    """Pulls and broadcasts may alternate; the same bytes give the same results over either transport."""
    trainer = kit_trainer(session)
    with WeightServer(session.host, session.token) as server:
        trainer.publish(trainer.next_version(), tag=23)
        before = session.greedy()
        for tag in (24, 25):
            _pulled(session, server, tag=tag)
            assert session.greedy()[1] != before[1], "a pull after a broadcast must take effect"
        _pulled(session, server, tag=23)
        assert session.greedy() == before, "pulled bytes must give the same results as the same bytes from a broadcast"
        trainer.publish(trainer.next_version(), tag=24)
        assert session.greedy()[1] != before[1], "a broadcast after a pull must take effect"


def pull_tries_the_next_source(session: Session) -> None:
    """If a source is down, lacks the version or closes the connection, the engine tries the next source."""
    with (
        WeightServer(session.host, session.token) as broken,
        WeightServer(session.host, session.token) as empty,
        WeightServer(session.host, session.token) as good,
    ):
        with WeightServer(session.host, session.token) as gone:
            pass
        data = _held(session, broken, tag=25, version=kit_trainer(session).next_version())
        broken.breaks_at = len(data) // 2
        _pulled(session, good, tag=25, version=kit_trainer(session).version, before=(gone, empty, broken))
        assert good.requests, "the last source must have been requested"


def pull_of_shards_is_served(session: Session) -> None:
    """A version in two shards is fetched from two servers, which hold the bytes of one shard each, and then served."""
    from inference_contract.conformance.trainer import digest, weights

    trainer = kit_trainer(session)
    bucket_bytes = max(trainer.layout.num_bytes // 8, 1)
    ranges = trainer.layout.shards(2, bucket_bytes)
    with WeightServer(session.host, session.token) as first, WeightServer(session.host, session.token) as second:
        _pulled(session, first, tag=34)
        before = session.greedy()
        _pulled(session, first, tag=35)
        version, data = trainer.next_version(), weights(trainer.layout, 34).numpy().tobytes()
        for server, held in zip((first, second), ranges, strict=True):
            only = bytearray(len(data))
            for start, end in held:
                only[start:end] = data[start:end]
            server.hold(trainer.epoch, version, bytes(only))
        announced = digest(weights(trainer.layout, 34))
        shards = [[first.url], [second.url]]
        _prepared(session, version, digest=announced, shards=shards, bucket_bytes=bucket_bytes)
        trainer.accepted(_commit(session, version, digest=announced), "committed")
        assert session.greedy() == before, "the bytes of two shards must give the same results as from one server"


def pull_with_wrong_bytes_is_refused(session: Session) -> None:
    """Fetched bytes that do not match the digest leave the old weights in service, and the next pull works."""
    with WeightServer(session.host, session.token) as server:
        serving = _pulled(session, server, tag=26)
        before, version = session.greedy(), kit_trainer(session).next_version()
        _held(session, server, tag=27, version=version)
        _prepared(session, version, sources=[server.url], digest="f" * 32)
        refused(_commit(session, version, digest="f" * 32), 502, code="digest_mismatch")
        _assert_serves(session, serving, before, "after wrong bytes")
        _pulled(session, server, tag=27)
        assert session.greedy()[1] != before[1], "the pull after wrong bytes must take effect"


def broken_pull_leaves_old_weights(session: Session) -> None:
    """The engine keeps its old weights when a server dies during a pull, and can be updated again."""
    from inference_contract.conformance.trainer import digest, weights

    trainer = kit_trainer(session)
    with WeightServer(session.host, session.token) as server:
        serving = _pulled(session, server, tag=28)
        before, version = session.greedy(), trainer.next_version()
        data = _held(session, server, tag=29, version=version)
        server.breaks_at = len(data) // 2
        announced = digest(weights(trainer.layout, 29))
        _prepared(session, version, sources=[server.url], digest=announced)
        error = refused(_commit(session, version, digest=announced), 502, 504, 409)
        assert error["code"] in ("peer_lost", "deadline_exceeded", "not_prepared"), f"got the code {error['code']!r}"
        _assert_serves(session, serving, before, "after half a pull")
        server.breaks_at = None
        _pulled(session, server, tag=29)
        assert session.greedy()[1] != before[1], "the pull after half a pull must take effect"


def aborted_pull_leaves_old_weights(session: Session) -> None:
    """Aborting a pull that waits for its server keeps the old weights, and the next pull works."""
    from inference_contract.conformance.trainer import digest, weights

    trainer = kit_trainer(session)
    with WeightServer(session.host, session.token) as server:
        serving = _pulled(session, server, tag=30)
        before, version = session.greedy(), trainer.next_version()
        server.open.clear()
        _held(session, server, tag=31, version=version)
        _prepared(session, version, sources=[server.url], digest=digest(weights(trainer.layout, 31)))
        trainer.accepted(trainer.update("abort", version), "aborted")
        server.open.set()
        _assert_serves(session, serving, before, "after an abort")
        _pulled(session, server, tag=31)
        assert session.greedy()[1] != before[1], "the pull after an abort must take effect"


def pull_in_flight(session: Session) -> None:
    """Sampling continues during a pull, and an answer's spans name the version that sampled each token."""
    deadline = time.monotonic() + session.timeout_s
    length = min(256, session.card().context_length // 2)
    with WeightServer(session.host, session.token) as server:
        while time.monotonic() < deadline:
            old = _pulled(session, server, tag=32)
            with Load(session, lambda seed: session.completed(n=16, max_tokens=length, seed=seed)) as load:
                new, announced = _prepared_from(session, (server,), tag=33)
                before_commit = load.sampled()
                kit_trainer(session).accepted(_commit(session, new, digest=announced), "committed")
                committed = load.sampled()
            update = LoadedUpdate(old, new, load.answers, before_commit, load.sampled() - committed)
            if update.spans_are_right(update.whole_choices()):
                return
    raise NotOffered("no sample under load was in flight while pulled weights were committed")


# --- steps -------------------------------------------------------------------------------------------------------


def _held(session: Session, server: WeightServer, *, tag: int, version: int) -> bytes:
    from inference_contract.conformance.trainer import weights

    trainer = kit_trainer(session)
    data: bytes = weights(trainer.layout, tag).numpy().tobytes()
    server.hold(trainer.epoch, version, data)
    return data


def _prepared(session: Session, version: int, *, digest: str, **where: Any) -> None:
    """Send PREPARE with `sources` or `shards`; fail if it is rejected. Raises `NotOffered` if engines cannot pull."""
    trainer = kit_trainer(session)
    response = trainer.update("prepare", version, transport="pull", digest=digest, group=None, generation=None, **where)
    if response.status_code == 400 and response.json().get("error", {}).get("param") == "transport":
        raise NotOffered("the engine does not offer the transport pull")
    trainer.accepted(response, "prepared")


def _commit(session: Session, version: int, *, digest: str) -> Any:
    return kit_trainer(session).update("commit", version, transport="pull", digest=digest)


def _pulled(
    session: Session,
    server: WeightServer,
    *,
    tag: int,
    version: int | None = None,
    before: tuple[WeightServer, ...] = (),
) -> int:
    """Run a whole update by pull, whose sources are the servers in `before` and then `server`; return its version."""
    trainer = kit_trainer(session)
    version, announced = _prepared_from(session, (*before, server), tag=tag, version=version)
    answer = trainer.accepted(_commit(session, version, digest=announced), "committed")
    assert (answer["epoch"], answer["version"]) == (trainer.epoch, version), "COMMIT must name the version served"
    return version


def _prepared_from(
    session: Session, servers: tuple[WeightServer, ...], *, tag: int, version: int | None = None
) -> tuple[int, str]:
    """Prepare a pull from `servers`; only the last holds the weights of `tag`. Return the version and the digest."""
    from inference_contract.conformance.trainer import digest, weights

    trainer = kit_trainer(session)
    version = trainer.next_version() if version is None else version
    _held(session, servers[-1], tag=tag, version=version)
    announced = digest(weights(trainer.layout, tag))
    _prepared(session, version, sources=[server.url for server in servers], digest=announced)
    return version, announced


def _assert_serves(session: Session, version: int, greedy: Any, when: str) -> None:
    assert session.card().model_version == version, f"{when} the old version must serve"
    assert session.greedy() == greedy, f"{when} the old weights must serve: greedy output changed"


CHECKS = (
    pull_is_served,
    pull_and_broadcast_take_turns,
    pull_tries_the_next_source,
    pull_of_shards_is_served,
    pull_with_wrong_bytes_is_refused,
    broken_pull_leaves_old_weights,
    aborted_pull_leaves_old_weights,
    pull_in_flight,
)
