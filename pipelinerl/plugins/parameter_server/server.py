"""Parameter server: the trainer writes versions of the weights to its host memory, and engines fetch them (RLAX §3).

A server holds a whole version, or only the shard that its announcement names; byte offsets are the same in both cases.

    trainer ─ announce ─▶ allocate memory ─ bytes (mapped, or PUT) ─▶ seal: compare digest ─▶ engines map it, or GET
                                                                                  └─▶ persistent copy, in parallel

    GET  /health                                liveness, without a token
    GET  /versions                              the versions held, and the engines and servers that may need them
    POST /versions                              announce a version: memory for it, if there is room
    GET  /versions/{epoch}/{version}            one version: digest, layout, where its memory can be mapped
    PUT  /weights/{epoch}/{version}             bytes of an announced version, for the range in Content-Range
    POST /versions/{epoch}/{version}/copy       fetch an announced version from another server instead
    POST /versions/{epoch}/{version}/seal       declare the bytes complete: if the digest matches, they are served
    GET  /weights/{epoch}/{version}             bytes of a sealed version; `Range: bytes=a-b` gives a part
    POST /progress                              report what engines serve and servers hold; drops unneeded versions

Bytes are served only after their digest was compared, from the memory in which they arrived. `version_table.py` has the
rules for versions. A replica is another server with the same bytes. A restarted server begins with the version that it
saved.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| the bytes of a PUT | the trainer sends, leaves or dies | `BODY_TIMEOUT_S` idle, or slower than `LEAST_BYTES_PER_S` |
| a reader of a GET | it takes the next piece, leaves or dies | `BODY_TIMEOUT_S` for a piece; then it is cut off |
| a copy | the other server | the timeout in the copy request |
| a digest, a save | its thread, which waits for nothing | – |
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from bisect import bisect_right
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from operator import itemgetter
from typing import Final

import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.datastructures import Headers
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from inference_contract import routes
from inference_contract.errors import ContractError, DeadlineExceeded, DigestMismatch, InvalidRequest
from pipelinerl.errors import CheckpointError, PipelineError
from pipelinerl.observability.status import PROMETHEUS_TYPE, prometheus_text
from pipelinerl.plugins.parameter_server import connection as wire
from pipelinerl.plugins.parameter_server.download import WeightPuller
from pipelinerl.plugins.parameter_server.version_table import (
    SnapshotStore,
    Version,
    VersionSnapshot,
    VersionTable,
    named,
)
from pipelinerl.roles.process import Identity
from pipelinerl.system.background import in_background
from pipelinerl.system.http_service import BodyRule, guard, listen, refusal, refuse_in_one_shape, serve_until
from pipelinerl.weights.layout import WeightDigest
from pipelinerl.weights.pull import PullOrder, PullSource, Range, Shard

#: Longest wait in seconds for a sender's next bytes, and for a reader to take the next piece.
BODY_TIMEOUT_S: Final = 30.0
#: Least average rate of a sender. A client that sends very slowly would otherwise occupy a version's memory
#: indefinitely.
LEAST_BYTES_PER_S: Final = 2**20
#: Bytes per write to a connection; between two such pieces, other connections are served.
_PIECE_BYTES: Final = 4 * 2**20

log = logging.getLogger("pipelinerl")


class ParameterServer:
    """The logic behind the server's routes. Methods run on one event loop; slow work runs on threads."""

    def __init__(self, table: VersionTable, *, puller: PullSource, store: SnapshotStore | None) -> None:
        self.table = table
        self._puller = puller
        self._store = store
        self._saved: wire.Key | None = None
        self._saving: asyncio.Task[None] | None = None
        self._closing = threading.Event()

    async def start(self) -> None:
        """Load the newest saved version whose bytes are intact, if there is one."""
        store = self._store
        if store is None:
            return
        for snapshot in await asyncio.to_thread(lambda: list(store.newest())):
            epoch, version = snapshot.key
            # Set the epoch directly: the limit on how far a request may raise the epoch does not apply to a snapshot.
            self.table.epoch = epoch
            announced = self.table.announce(
                wire.Announcement(epoch=epoch, version=version, layout=snapshot.layout, shard=snapshot.shard)
            )
            try:
                await asyncio.to_thread(store.read, snapshot, announced.segment.bytes)
            except CheckpointError as error:
                log.error("skipping a damaged snapshot: %s", error)
                continue
            self.table.seal(snapshot.key, snapshot.digest, snapshot.whole)
            self._saved = snapshot.key
            log.info("starting with weights %s, loaded from %s", named(snapshot.key), store.place)
            return

    async def close(self) -> None:
        self._closing.set()
        if self._saving is not None:
            await self._saving

    def state(self) -> wire.ServerState:
        return wire.ServerState(
            epoch=self.table.epoch,
            room=self.table.room,
            versions=tuple(version.record() for version in self.table.versions()),
            progress=self.table.progress,
            saved=self._saved,
        )

    async def seal(self, key: wire.Key, seal: wire.Seal) -> wire.VersionRecord:
        """Serve the version if its bytes match the digest. Raises NotPrepared, DigestMismatch (write again)."""
        with self.table.using(key) as version:

            def written() -> str:
                digest = WeightDigest()
                for start, end in version.ranges:
                    digest.update(version.segment.bytes[start:end])
                return digest.hexdigest()

            digest = version.digest or await asyncio.wrap_future(in_background("seal", written))
            if digest != seal.digest:
                raise DigestMismatch(
                    f"version {named(key)}: digest must be {seal.digest}, the bytes written have {digest}",
                    param="digest",
                )
            sealed = self.table.seal(key, seal.digest, seal.whole)
        self._save_newest()
        return sealed.record()

    async def copy(self, key: wire.Key, order: wire.CopyOrder) -> wire.VersionRecord:
        """Fetch an announced version from another server, and seal it. Raises NotPrepared, or its errors."""
        with self.table.using(key) as version:
            if version.digest is None:
                pull = PullOrder(
                    shards=(Shard((order.source,), version.ranges),),
                    epoch=key[0],
                    version=key[1],
                    digest=order.digest,
                    deadline=time.monotonic() + order.timeout_s,
                    given_up=self._closing,
                )
                fetching = in_background(
                    "copy", lambda: self._puller.fetch(pull, into=version.segment.bytes, on_progress=lambda _: None)
                )
                await asyncio.wrap_future(fetching)
            sealed = self.table.seal(key, order.digest, order.whole)
        self._save_newest()
        return sealed.record()

    def _save_newest(self) -> None:
        if self._store is not None and (self._saving is None or self._saving.done()):
            self._saving = asyncio.create_task(self._save(self._store))

    async def _save(self, store: SnapshotStore) -> None:
        """Save the newest version; repeat if a newer one has appeared. After a failure, wait for the next version."""
        while (newest := self.table.newest()) is not None and newest.key != self._saved:
            key, layout, shard = newest.key, newest.layout, newest.shard
            snapshot = VersionSnapshot(
                key=key, layout=layout, shard=shard, digest=newest.digest or "", whole=newest.whole or ""
            )
            with self.table.using(key) as version:
                saving = in_background("save", partial(store.save, snapshot, version.segment.bytes))
                await asyncio.wait({asyncio.wrap_future(saving)})
            if (error := saving.exception()) is not None:
                log.error("version %s was not saved to %s: %s", named(key), store.place, error)
                return
            self._saved = key


# --- HTTP --------------------------------------------------------------------------------------------------------


def create_app(server: ParameterServer, *, token: str | None) -> FastAPI:
    """Return the application that serves `server` and starts and closes it; `token` is required except on /health."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await server.start()
        try:
            yield
        finally:
            await server.close()

    app = FastAPI(title="pipelinerl parameter server", lifespan=lifespan, openapi_url=None)
    app.get(routes.HEALTH)(lambda: {"state": "ready"})

    @app.get(routes.METRICS)
    async def metrics() -> Response:
        state = server.state()
        figures = {
            "epoch": state.epoch,
            "room": state.room,
            "versions": len(state.versions),
            "newest_version": max((record.version for record in state.versions), default=-1),
            "saved_version": -1 if state.saved is None else state.saved[1],
            "readers": len(state.progress),
        }
        return Response(prometheus_text(figures, prefix="pipelinerl_parameter_server"), media_type=PROMETHEUS_TYPE)

    @app.get(wire.VERSIONS)
    async def state() -> wire.ServerState:
        return server.state()

    @app.post(wire.VERSIONS)
    async def announce(announcement: wire.Announcement) -> wire.VersionRecord:
        return server.table.announce(announcement).record()

    @app.get(wire.VERSION)
    async def record(epoch: int, version: int) -> wire.VersionRecord:
        return server.table.whole((epoch, version)).record()

    @app.post(wire.COPY)
    async def copy(epoch: int, version: int, order: wire.CopyOrder) -> wire.VersionRecord:
        return await server.copy((epoch, version), order)

    @app.post(wire.SEAL)
    async def seal(epoch: int, version: int, seal: wire.Seal) -> wire.VersionRecord:
        return await server.seal((epoch, version), seal)

    @app.post(wire.PROGRESS)
    async def progress(report: wire.ProgressReport) -> wire.ServerState:
        server.table.confirm(report.epoch, report.progress)
        return server.state()

    # Endpoints that are objects, not functions, are ASGI applications to Starlette: no request object is built.
    app.router.routes.append(Route(routes.WEIGHTS, _Read(server.table), methods=["GET"]))
    app.router.routes.append(Route(routes.WEIGHTS, _Write(server.table), methods=["PUT"]))

    @app.exception_handler(ContractError)
    async def refused(_: Request, error: ContractError) -> Response:
        return JSONResponse(error.to_wire(), error.status)

    @app.exception_handler(PipelineError)
    async def failed(_: Request, error: PipelineError) -> Response:
        return refusal(502, str(error), code="failed")

    refuse_in_one_shape(app)
    guard(app, token=token, puts=BodyRule.STREAMED)
    return app


class _Read:
    def __init__(self, table: VersionTable) -> None:
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = _key(scope)
        whole = self._table.whole(key)
        size, requested = whole.layout.num_bytes, Headers(scope=scope).get("range")
        start, end = _range("bytes=0-" if requested is None else requested, r"bytes=(\d{1,18})-(\d{0,18})", whole)
        with self._table.using(key) as version:
            headers = [(b"content-length", str(end - start).encode()), (b"content-type", b"application/octet-stream")]
            if requested is not None:
                headers.append((b"content-range", f"bytes {start}-{end - 1}/{size}".encode()))
            await send({"type": "http.response.start", "status": 200 if requested is None else 206, "headers": headers})
            try:
                for piece in range(start, end, _PIECE_BYTES):
                    body = version.segment.bytes.data[piece : min(piece + _PIECE_BYTES, end)]
                    async with asyncio.timeout(BODY_TIMEOUT_S):
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
            except TimeoutError:  # returning before the body is complete closes the connection
                log.warning(
                    "a reader of %s has read nothing for %g s: closing its connection", named(key), BODY_TIMEOUT_S
                )


class _Write:
    def __init__(self, table: VersionTable) -> None:
        self._table = table

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = _key(scope)
        with self._table.using(key) as version:
            if version.digest is not None:
                raise InvalidRequest(f"version {named(key)} is complete and can no longer be written")
            size = version.layout.num_bytes
            named_range = Headers(scope=scope).get("content-range", f"bytes 0-{size - 1}/{size}")
            at, end = _range(named_range, rf"bytes (\d{{1,18}})-(\d{{1,18}})/{size}", version)
            clock, more = asyncio.get_running_loop().time, True
            deadline = clock() + BODY_TIMEOUT_S + (end - at) / LEAST_BYTES_PER_S
            while more:
                try:
                    async with asyncio.timeout_at(min(deadline, clock() + BODY_TIMEOUT_S)):
                        message = await receive()
                except TimeoutError:
                    raise DeadlineExceeded(
                        f"no byte of the body arrived for {BODY_TIMEOUT_S:g} s, or fewer than {LEAST_BYTES_PER_S} per "
                        "second"
                    ) from None
                if message["type"] == "http.disconnect":
                    return
                chunk, more = message.get("body", b""), message.get("more_body", False)
                if at + len(chunk) > end:
                    raise InvalidRequest(f"received more bytes than fit the range up to {end}")
                version.segment.bytes[at : at + len(chunk)] = np.frombuffer(chunk, np.uint8)
                at += len(chunk)
            if at != end:
                raise InvalidRequest(f"{end - at} bytes of the range up to {end} did not arrive")
        await Response(status_code=204)(scope, receive, send)


def _key(scope: Scope) -> wire.Key:
    path = scope["path_params"]
    try:
        return int(path["epoch"]), int(path["version"])
    except ValueError:
        raise InvalidRequest("epoch and version must be whole numbers", param="version") from None


def _range(text: str, form: str, version: Version) -> Range:
    """Parse a header's byte range [start, end) by the regex `form`. Raises `InvalidRequest` unless it is held here."""
    match, size = re.fullmatch(form, text), version.layout.num_bytes
    start, end = (int(match[1]), int(match[2] or size - 1) + 1) if match else (0, 0)
    if match is None or not start < end <= size:
        raise InvalidRequest(f"the range must lie within the {size} bytes of the version, as bytes=first-last")
    at = bisect_right(version.ranges, start, key=itemgetter(0)) - 1
    if at < 0 or end > version.ranges[at][1]:
        raise InvalidRequest(f"bytes {start} to {end} are not all on this server, which holds {version.shard}")
    return start, end


async def run(identity: Identity) -> None:
    """Serve weights until the process is stopped, beginning with versions that an earlier process saved in this run."""
    config = identity.config.parameter_server
    with listen(identity.host, identity.port) as listener:
        server = ParameterServer(
            VersionTable(room=config.versions),
            puller=WeightPuller(token=identity.token),
            store=await asyncio.to_thread(store_of, identity),
        )
        await serve_until(create_app(server, token=identity.token), listener)


def store_of(identity: Identity) -> SnapshotStore:
    """Return the store of weight versions in the run's directory, or at `parameter_server.copies`.

    Versions that another run of this name left at `copies` are deleted, so that they are not served as this run's. To
    recognise its own store, a run records the store's address in a file of its directory.
    """
    copies, own = identity.config.parameter_server.copies, identity.run_dir / "weights"
    if copies is None:
        return SnapshotStore(str(own / identity.name))
    store = SnapshotStore(f"{copies.rstrip('/')}/{identity.config.run.name}/{identity.name}")
    ours = own / f"{identity.name}.place"
    if not ours.exists() or ours.read_text() != store.place:
        store.clear()
        ours.parent.mkdir(parents=True, exist_ok=True)
        ours.write_text(store.place)
    return store
