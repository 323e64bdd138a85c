"""`WeightPuller`: fetches each shard of a version from the first server that can provide it, by the best transport.

    each shard: request the server's record ─▶ map its memory, or open streams ─▶ parts arrive and are hashed
    all shards have arrived ─▶ compare digests

Shards are fetched concurrently. If a server fails, the parts already received are kept, and the shard's next server
provides the rest. If no server can provide a shard, the other shards are cancelled and the error names it. Weights are
returned only if their digest equals the announced one. A pull ends by its deadline, or soon after it is cancelled. If a
server does not report a memory segment that can be mapped, HTTP is used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, final

from inference_contract.errors import ContractError, DigestMismatch, NotPrepared
from pipelinerl.errors import DeadlineError, UpdateError
from pipelinerl.system.background import in_background
from pipelinerl.weights.parameter_server import connection
from pipelinerl.weights.parameter_server.connection import (
    HttpTransport,
    ServerClient,
    ShardTransport,
    SharedMemoryTransport,
    VersionRecord,
    check_wanted,
    watch,
)
from pipelinerl.weights.parameter_server.shared_memory import Access, Attachments, ReceiveBuffer, SharedMemoryAddress
from pipelinerl.weights.pull import PullOrder

#: Time limit in seconds for a server to report its record of a version.
_RECORD_S: Final = 5.0


@final
class WeightPuller:
    """A `PullSource` for one pull at a time; shared memory of servers stays mapped for the next pull."""

    def __init__(self, *, token: str | None, shared_memory: bool = True) -> None:
        """Create the puller. `token` is the servers' bearer token; without `shared_memory` all bytes travel by HTTP."""
        self._token = token
        self._shared_memory = shared_memory
        self._attached = Attachments(Access.READ)

    def fetch(self, order: PullOrder, *, into: Any, on_progress: Callable[[int], None] = lambda _: None) -> str:
        """Fill `into` with the bytes of a version; see `PullSource`."""
        while True:
            buffer = ReceiveBuffer(into, shards=[shard.ranges for shard in order.shards], on_progress=on_progress)
            self._bring(order, buffer)
            try:
                return _agreed(order, buffer)
            except DigestMismatch:
                # It is unknown which server sent the wrong bytes, so fetch all shards again, each from the next server
                # on its list.
                rest = [replace(shard, sources=shard.sources[1:] or shard.sources) for shard in order.shards]
                if all(len(shard.sources) == 1 for shard in order.shards):
                    raise
                order = replace(order, shards=tuple(rest))

    def _bring(self, order: PullOrder, buffer: ReceiveBuffer) -> None:
        others_failed = threading.Event()
        together = replace(order, given_up=others_failed)
        bringing = [
            in_background(f"pull-{number}", partial(self._bring_shard, together, buffer, number))
            for number in range(len(order.shards))
        ]
        try:
            watch(bringing, order)
            failed = [error for one in bringing if one.done() and (error := one.exception()) is not None]
        finally:
            others_failed.set()
            for one in bringing:
                one.exception()  # wait for the cancelled fetches: no thread may write into the buffer afterwards
        if failed:
            raise failed[0]

    def _bring_shard(self, order: PullOrder, buffer: ReceiveBuffer, number: int) -> None:
        failures: dict[str, UpdateError | DeadlineError | ContractError] = {}
        for source in order.shards[number].sources:
            check_wanted(order)
            try:
                self._road(source, order).bring(order, buffer, number)
                return
            except (UpdateError, DeadlineError, ContractError) as error:
                failures[source] = error
        check_wanted(order)
        count = len(order.shards)
        what = f"version {order.epoch}.{order.version}" + (f", shard {number} of {count}" if count > 1 else "")
        raise UpdateError(f"no source gave {what}: " + "; ".join(f"{url}: {why}" for url, why in failures.items()))

    def _road(self, source: str, order: PullOrder) -> ShardTransport:
        address = self._segment(source, order) if self._shared_memory else None
        attachment = None if address is None else self._attached.to(source, address)
        return HttpTransport(source, token=self._token) if attachment is None else SharedMemoryTransport(attachment)

    def _segment(self, source: str, order: PullOrder) -> SharedMemoryAddress | None:
        """Return the address of the version's memory, None if not reported. Raises UpdateError, NotPrepared."""
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


def _agreed(order: PullOrder, buffer: ReceiveBuffer) -> str:
    digest = buffer.digest()
    if digest != order.digest:
        raise DigestMismatch(
            f"version {order.epoch}.{order.version}: digest must be {order.digest}, received {digest}; the old weights "
            "still serve",
            param="digest",
        )
    return digest
