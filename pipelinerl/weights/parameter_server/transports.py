"""Transports for the bytes of one version from one parameter server: shared memory, or HTTP.

`WeightPuller` chooses by trying: a client that can map the server's segment copies from it; any other fetches ranges.

Measurements behind this choice, on two shared cores, in GB/s for 24 MB and for 310 MB:

    a copy between private buffers                          7.3    8.5
    a copy from a newly mapped segment                      3.2    5.0     page faults cost as much as the copy
    pread from the segment                                  2.6    4.9
    HTTP, from a server in one event loop                   1.1    2.0     1 stream; 4 streams: 1.3, 2.1
    HTTP, from threads that sendfile                        1.4    1.4     1 stream; 4 streams: 2.0, 1.9
    TensorStore: OCDBT between processes                    1.0 to 1.7     and keeps every version

The server therefore reuses segments and clients keep them mapped, which leaves one copy and no page fault. HTTP is
served from the event loop that serves everything else, since on few cores the sender is not the bottleneck. Both
transports write straight into the buffer from which the engine will serve.

Including digest and request, a pull of 310 MB takes 1.4 times as long as a copy through shared memory, and 6.3 times by
HTTP. A gloo broadcast takes 5.3 times. More than two streams gain little on one
host; between hosts they use bandwidth that one TCP window cannot.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final, Protocol, final

import numpy as np

from inference_contract import routes
from pipelinerl.errors import DeadlineError, UpdateError
from pipelinerl.system.background import in_background
from pipelinerl.weights.parameter_server.connection import ServerClient
from pipelinerl.weights.parameter_server.receive_buffer import Part, ReceiveBuffer
from pipelinerl.weights.parameter_server.shared_memory import Attachment
from pipelinerl.weights.pull import PullOrder

#: Large enough that the request overhead is negligible, small enough that streams end together.
HTTP_PART_BYTES: Final = 8 * 2**20
#: A copied part is hashed while it is still in cache.
MEMORY_PART_BYTES: Final = 2**20
STREAMS: Final = 2

#: Interval in seconds at which a pull checks whether it was cancelled.
_WATCH_S: Final = 0.05


class ShardTransport(Protocol):
    """Fetches the missing parts of a shard."""

    def bring(self, order: PullOrder, buffer: ReceiveBuffer, shard: int) -> None:
        """Fetch the shard's missing parts; return when none is missing.

        Raises:
            UpdateError: the server cannot provide them, the connection failed, or the pull was cancelled.
            DeadlineError: they did not arrive in time.
        """
        ...


@final
class SharedMemoryTransport:
    """Copies from a mapped segment."""

    def __init__(self, attachment: Attachment) -> None:
        self._memory = attachment.bytes

    def bring(self, order: PullOrder, buffer: ReceiveBuffer, shard: int) -> None:
        """Copy the shard's missing parts into the buffer."""
        if len(self._memory) != buffer.num_bytes:
            raise UpdateError(f"the server holds {len(self._memory)} bytes, this model has {buffer.num_bytes}")
        for start, end in buffer.missing(shard, part_bytes=MEMORY_PART_BYTES):
            check_wanted(order)
            memory = buffer.memory((start, end))
            np.copyto(memory, self._memory[start:end])
            buffer.landed((start, end), memory)


@final
class HttpTransport:
    """Fetches ranges over parallel streams, each with its own connection and thread."""

    def __init__(self, url: str, *, token: str | None, streams: int = STREAMS) -> None:
        self._url = url
        self._token = token
        self._streams = streams

    def bring(self, order: PullOrder, buffer: ReceiveBuffer, shard: int) -> None:
        """Fetch the shard's missing parts into the buffer."""
        parts = deque(buffer.missing(shard, part_bytes=HTTP_PART_BYTES))
        clients = [ServerClient(self._url, token=self._token) for _ in range(min(self._streams, len(parts)))]
        path = routes.WEIGHTS.format(epoch=order.epoch, version=order.version)
        streams = [
            in_background("pull", lambda client=client: _stream(client, path, parts, order, buffer))  # type: ignore[misc]
            for client in clients
        ]
        try:
            watch(streams, order)
        finally:
            parts.clear()
            for client in clients:
                client.cut()
            for stream in streams:
                stream.exception()  # a cut stream ends at once; no thread may write into the buffer after this
            for client in clients:
                client.close()
        failures = [failure for stream in streams if (failure := stream.exception()) is not None]
        if failures:
            raise failures[0]


def _stream(client: ServerClient, path: str, parts: deque[Part], order: PullOrder, buffer: ReceiveBuffer) -> None:
    while True:
        try:
            part = parts.popleft()
        except IndexError:
            return
        memory = buffer.memory(part)
        client.read(path, memory.data, part[0], deadline=order.deadline)
        buffer.landed(part, memory)


def watch(streams: Sequence[Future[None]], order: PullOrder) -> None:
    """Wait until all streams have ended or one has failed; raise if the pull was cancelled or is too late."""
    ended = threading.Semaphore(0)
    for stream in streams:
        stream.add_done_callback(lambda _: ended.release())
    remaining = len(streams)
    while remaining:
        check_wanted(order)
        if ended.acquire(timeout=_WATCH_S):
            remaining -= 1
            if any(stream.done() and stream.exception() is not None for stream in streams):
                return


def check_wanted(order: PullOrder) -> None:
    """Raise `UpdateError` if the pull was cancelled, `DeadlineError` if its deadline has passed."""
    if order.given_up.is_set():
        raise UpdateError("the pull was cancelled")
    if time.monotonic() > order.deadline:
        raise DeadlineError("the weights did not arrive in time")
