"""`WeightPuller`: fetches each shard of a version from the first server that can give it, on the best transport to it.

    each shard: ask a server for its record ─▶ map its segment, or open streams ─▶ parts land and are hashed
    all shards have landed ─▶ compare digests

Promises: shards come at the same time; what has landed from a server that broke off is kept, and the next server of
its shard gives the rest; a shard that nobody can give ends the others, and is named; nothing is returned whose digest
is not the one announced; it ends by the deadline, and soon after it is given up. A server that does not
say what it holds (any that satisfies the contract, without being ours) is fetched from by HTTP.
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
from pipelinerl.weights.parameter_server import wire
from pipelinerl.weights.parameter_server.connection import ServerClient
from pipelinerl.weights.parameter_server.receive_buffer import ReceiveBuffer
from pipelinerl.weights.parameter_server.shared_memory import Access, Attachments, SharedMemoryAddress
from pipelinerl.weights.parameter_server.transports import (
    HttpTransport,
    ShardTransport,
    SharedMemoryTransport,
    check_wanted,
    watch,
)
from pipelinerl.weights.parameter_server.wire import VersionRecord
from pipelinerl.weights.pull import PullOrder

#: A server that is there says what it holds within this time.
_RECORD_S: Final = 5.0


@final
class WeightPuller:
    """Satisfies `PullSource`. One pull at a time; the segments of the servers it has asked stay mapped."""

    def __init__(self, *, token: str | None, shared_memory: bool = True) -> None:
        """`token` is the servers' bearer token; without `shared_memory` everything goes by HTTP."""
        self._token = token
        self._shared_memory = shared_memory
        self._attached = Attachments(Access.READ)

    def fetch(self, order: PullOrder, *, into: Any, on_progress: Callable[[int], None] = lambda _: None) -> str:
        """Fill `into`; see `PullSource`."""
        while True:
            buffer = ReceiveBuffer(into, shards=[shard.ranges for shard in order.shards], on_progress=on_progress)
            self._bring(order, buffer)
            try:
                return _agreed(order, buffer)
            except DigestMismatch:
                # Some server gave wrong bytes, and nobody knows which: everything from the next of each shard.
                rest = [replace(shard, sources=shard.sources[1:] or shard.sources) for shard in order.shards]
                if all(len(shard.sources) == 1 for shard in order.shards):
                    raise
                order = replace(order, shards=tuple(rest))

    def _bring(self, order: PullOrder, buffer: ReceiveBuffer) -> None:
        """All shards at once; the failure of one gives the others up."""
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
                one.exception()  # given up, it ends at once; nobody may write into the buffer after this
        if failed:
            raise failed[0]

    def _bring_shard(self, order: PullOrder, buffer: ReceiveBuffer, number: int) -> None:
        """One shard, from the first of its sources that can give it, or the rest of it."""
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
        """Through memory where the server's segment can be mapped here, else by HTTP."""
        address = self._segment(source, order) if self._shared_memory else None
        attachment = None if address is None else self._attached.to(source, address)
        return HttpTransport(source, token=self._token) if attachment is None else SharedMemoryTransport(attachment)

    def _segment(self, source: str, order: PullOrder) -> SharedMemoryAddress | None:
        """Where the server says that the version lies; None if it does not say, or knows no more than the contract.

        Raises:
            UpdateError, NotPrepared: the server cannot be reached, or does not hold the version.
        """
        client = ServerClient(source, token=self._token)
        path = wire.VERSION.format(epoch=order.epoch, version=order.version)
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
    """The digest of what landed. Raises `DigestMismatch` when it is not the one that was announced."""
    digest = buffer.digest()
    if digest != order.digest:
        raise DigestMismatch(
            f"version {order.epoch}.{order.version}: digest must be {order.digest}, received {digest}; the old weights "
            "still serve",
            param="digest",
        )
    return digest
