"""The transports on which the bytes of one version come from one parameter server: shared memory, or HTTP.

`WeightPuller` chooses by trying: who can map the server's segment copies out of it, anybody else fetches ranges.

Why these two, measured on two shared cores, in GB/s of 24 MB and of 310 MB:

    a copy between private buffers                          7.3    8.5
    a copy from a segment that is mapped anew               3.2    5.0     page faults cost as much as the copy
    pread from the segment                                  2.6    4.9
    HTTP, from a server in one event loop                   1.1    2.0     1 stream; 4 streams: 1.3, 2.1
    HTTP, from threads that sendfile                        1.4    1.4     1 stream; 4 streams: 2.0, 1.9
    TensorStore: OCDBT between processes                    1.0 to 1.7     and keeps every version

So segments are reused by the server and stay mapped here, which leaves one copy and no fault; and HTTP is served from
the event loop that serves everything else, since on few cores the sender is not what limits it. Both read straight into
the buffer that the engine will serve from. With digest and request the whole pull of 310 MB then takes 1.4 times a copy
through memory and 6.3 times by HTTP, a gloo broadcast 5.3 times (`pipelinerl bench parameter_server`). More than two
streams gain little on one host; between hosts they fill the pipe that one TCP window does not.
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

#: Large enough that a request is nothing beside its bytes, small enough that streams end together.
HTTP_PART_BYTES: Final = 8 * 2**20
#: A part that was copied is hashed before it leaves the cache.
MEMORY_PART_BYTES: Final = 2**20
STREAMS: Final = 2

#: How often a pull looks whether it is still wanted.
_WATCH_S: Final = 0.05


class ShardTransport(Protocol):
    """Brings the missing parts of a shard."""

    def bring(self, order: PullOrder, buffer: ReceiveBuffer, shard: int) -> None:
        """Returns when nothing of the shard is missing any more.

        Raises:
            UpdateError: the server cannot give them, broke off, or they were given up.
            DeadlineError: they did not come in time.
        """
        ...


@final
class SharedMemoryTransport:
    """Copies out of a mapped segment."""

    def __init__(self, attachment: Attachment) -> None:
        self._memory = attachment.bytes

    def bring(self, order: PullOrder, buffer: ReceiveBuffer, shard: int) -> None:
        """Fill what the buffer lacks of the shard."""
        if len(self._memory) != buffer.num_bytes:
            raise UpdateError(f"the server holds {len(self._memory)} bytes, this model has {buffer.num_bytes}")
        for start, end in buffer.missing(shard, part_bytes=MEMORY_PART_BYTES):
            check_wanted(order)
            memory = buffer.memory((start, end))
            np.copyto(memory, self._memory[start:end])
            buffer.landed((start, end), memory)


@final
class HttpTransport:
    """Fetches ranges over parallel streams, each a connection and a thread."""

    def __init__(self, url: str, *, token: str | None, streams: int = STREAMS) -> None:
        self._url = url
        self._token = token
        self._streams = streams

    def bring(self, order: PullOrder, buffer: ReceiveBuffer, shard: int) -> None:
        """Fill what the buffer lacks of the shard."""
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
                stream.exception()  # cut, it ends at once; nobody may write into the buffer after this
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
    """Until all have ended or one has failed; raises when they are not wanted any more, or too late."""
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
    """Raises `UpdateError` when the order was given up, `DeadlineError` when it is too late for it."""
    if order.given_up.is_set():
        raise UpdateError("the pull was given up")
    if time.monotonic() > order.deadline:
        raise DeadlineError("the weights did not come in time")
