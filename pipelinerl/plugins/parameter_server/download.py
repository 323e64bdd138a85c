"""`WeightPuller`: fetches each shard of a version from the first server that can provide it, by shared memory or HTTP.

    each shard: get the server's record of the version ─▶ map its memory, or open streams ─▶ parts arrive, are hashed
    all shards have arrived ─▶ compare digests

Shards are fetched concurrently. If a server fails, the parts already received are kept, and the shard's next server
provides the rest. If no server can provide a shard, the other shards are cancelled and the error names it. Weights are
returned only if their digest equals the announced one. A pull ends by its deadline, or soon after it is cancelled. If a
server does not report a memory segment that can be mapped, HTTP is used.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inference_contract import routes
from inference_contract.errors import ContractError, DigestMismatch, NotPrepared
from pipelinerl.errors import DeadlineError, UpdateError
from pipelinerl.plugins.parameter_server import connection
from pipelinerl.plugins.parameter_server.connection import ServerClient, VersionRecord
from pipelinerl.plugins.parameter_server.shared_memory import (
    Attachments,
    ReceiveBuffer,
    SharedMemoryAddress,
)
from pipelinerl.system.background import in_background
from pipelinerl.weights.pull import PullOrder

#: Bytes fetched per HTTP request: enough to keep the overhead small, few enough that parallel streams end about
#: together.
_HTTP_PART_BYTES: Final = 8 * 2**20
#: Bytes per copy from shared memory: few enough to be hashed while they are still in the processor's cache.
_MEMORY_PART_BYTES: Final = 2**20
#: Number of parallel HTTP connections to a server.
_STREAMS: Final = 2
#: Interval in seconds at which a pull checks whether it was cancelled.
_WATCH_S: Final = 0.05
#: Time limit in seconds for a server to report its record of a version.
_RECORD_S: Final = 5.0


class WeightPuller:
    """A `PullSource` for one pull at a time; shared memory of servers stays mapped for the next pull."""

    def __init__(self, *, token: str | None, shared_memory: bool = True) -> None:
        self._token = token
        self._shared_memory = shared_memory
        self._attached = Attachments()

    def fetch(self, order: PullOrder, *, into: Any, on_progress: Callable[[int], None] = lambda _: None) -> str:
        while True:
            buffer = ReceiveBuffer(into, shards=[shard.ranges for shard in order.shards], on_progress=on_progress)
            others_failed = threading.Event()
            together = replace(order, given_up=others_failed)
            shards = [partial(self._bring_shard, together, buffer, number) for number in range(len(order.shards))]
            _run_together(shards, order, cancel=others_failed.set)
            digest = buffer.digest()
            if digest == order.digest:
                return digest
            if all(len(shard.sources) == 1 for shard in order.shards):
                raise DigestMismatch(
                    f"version {order.epoch}.{order.version}: digest must be {order.digest}, received {digest}; the old "
                    "weights still serve",
                    param="digest",
                )
            # It is unknown which server sent the wrong bytes, so fetch all shards again, each from the next server on
            # its list.
            rest = [replace(shard, sources=shard.sources[1:] or shard.sources) for shard in order.shards]
            order = replace(order, shards=tuple(rest))

    def _bring_shard(self, order: PullOrder, buffer: ReceiveBuffer, number: int) -> None:
        failures: dict[str, UpdateError | DeadlineError | ContractError] = {}
        for source in order.shards[number].sources:
            _check_wanted(order)
            try:
                address = self._segment(source, order) if self._shared_memory else None
                attachment = None if address is None else self._attached.to(source, address)
                if attachment is not None:
                    _copy_shard(attachment.bytes, order, buffer, number)
                else:
                    _stream_shard(source, self._token, order, buffer, number)
                return
            except (UpdateError, DeadlineError, ContractError) as error:
                failures[source] = error
        _check_wanted(order)
        count = len(order.shards)
        what = f"version {order.epoch}.{order.version}" + (f", shard {number} of {count}" if count > 1 else "")
        raise UpdateError(f"no source gave {what}: " + "; ".join(f"{url}: {why}" for url, why in failures.items()))

    def _segment(self, source: str, order: PullOrder) -> SharedMemoryAddress | None:
        """Return the version's memory on the server, if reported. Raises NotPrepared if it lacks it."""
        client = ServerClient(source, token=self._token)
        path = connection.VERSION.format(epoch=order.epoch, version=order.version)
        try:
            deadline = min(order.deadline, time.monotonic() + _RECORD_S)
            return client.call("GET", path, VersionRecord, deadline=deadline).segment
        except NotPrepared:
            raise
        except ContractError:
            return None
        finally:
            client.close()


def _copy_shard(source: NDArray[np.uint8], order: PullOrder, buffer: ReceiveBuffer, shard: int) -> None:
    """Copy the shard's missing parts from a server's shared memory, which is mapped in this process."""
    if len(source) != buffer.num_bytes:
        raise UpdateError(f"the server holds {len(source)} bytes, this model has {buffer.num_bytes}")
    for start, end in buffer.missing(shard, part_bytes=_MEMORY_PART_BYTES):
        _check_wanted(order)
        memory = buffer.memory((start, end))
        np.copyto(memory, source[start:end])
        buffer.landed((start, end), memory)


def _stream_shard(url: str, token: str | None, order: PullOrder, buffer: ReceiveBuffer, shard: int) -> None:
    """Fetch the shard's missing parts by HTTP over parallel streams, each with its own connection and thread."""
    parts = deque(buffer.missing(shard, part_bytes=_HTTP_PART_BYTES))
    clients = [ServerClient(url, token=token) for _ in range(min(_STREAMS, len(parts)))]
    path = routes.WEIGHTS.format(epoch=order.epoch, version=order.version)

    def stream(client: ServerClient) -> None:
        while True:
            try:
                part = parts.popleft()
            except IndexError:
                return
            memory = buffer.memory(part)
            client.read(path, memory.data, part[0], deadline=order.deadline)
            buffer.landed(part, memory)

    def cut() -> None:
        parts.clear()
        for client in clients:
            client.cut()

    try:
        _run_together([partial(stream, client) for client in clients], order, cancel=cut)
    finally:
        for client in clients:
            client.close()


def _run_together(fetches: Sequence[Callable[[], None]], order: PullOrder, *, cancel: Callable[[], None]) -> None:
    """Run fetches on threads until all have ended. Raises the first error, or an error for a cancelled or late pull."""
    running = [in_background("pull", fetch) for fetch in fetches]
    waiting: Collection[Future[None]] = running
    errors: list[BaseException] = []
    try:
        while waiting and not errors:
            _check_wanted(order)
            _, waiting = wait(running, timeout=_WATCH_S, return_when=FIRST_EXCEPTION)
            errors = [error for each in running if each.done() and (error := each.exception()) is not None]
    finally:
        cancel()
        wait(running)  # no thread may write into the buffer afterwards
    if errors:
        raise errors[0]


def _check_wanted(order: PullOrder) -> None:
    if order.given_up.is_set():
        raise UpdateError("the pull was cancelled")
    if time.monotonic() > order.deadline:
        raise DeadlineError("the weights did not arrive in time")
