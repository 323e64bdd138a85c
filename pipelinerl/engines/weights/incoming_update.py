"""`IncomingUpdate`: the transfer of one update into an engine's buffer, broadcast to it or pulled by it.

The bytes are received and hashed on a separate thread, which always ends. A pull ends by the deadline of its PREPARE, a
broadcast when no piece has arrived for the timeout of its PREPARE. `give_up` ends a transfer earlier: a pull within
moments, a broadcast as soon as rank 0 sends or leaves. The buffer is free for the next update once `received` is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from inference_contract.weights import WeightLayout, WeightUpdateRequest, cut
from pipelinerl.engines.weights.group_member import GroupEndpoint, GroupMember
from pipelinerl.errors import PipelineError, UpdateError
from pipelinerl.system.background import in_background, in_background_soon
from pipelinerl.weights.layout import describe_bucket
from pipelinerl.weights.pull import PullOrder, PullSource, Shard


@dataclass(frozen=True, slots=True)
class WeightSink:
    """The layout and the buffer of incoming weights, and the function to call when all bytes have arrived."""

    layout: WeightLayout
    buffer: Any
    finish: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Received:
    """The digest of all received bytes, and the duration of the transfer."""

    digest: str
    seconds: float


@dataclass(slots=True)
class _ByteCount:
    all_bytes: int
    num_bytes: int = 0
    at: float = field(default_factory=time.monotonic)

    def on_progress(self, num_bytes: int) -> None:
        self.num_bytes, self.at = num_bytes, time.monotonic()


@dataclass(frozen=True, slots=True)
class IncomingUpdate:
    """One update that is being received.

    Attributes:
        request: the PREPARE that requested it.
        sender, unblock: for error messages, the sender's name, and the event that would end a wait for the sender.
        received: future of the result; it fails if the transfer fails.
        give_up: function that ends the transfer as early as possible; for updates that failed or are not needed.
    """

    request: WeightUpdateRequest
    sender: str
    unblock: str
    received: Future[Received]
    give_up: Callable[[], None]
    _progress: _ByteCount

    def is_of(self, request: WeightUpdateRequest) -> bool:
        """Return whether `request` repeats this update: the same bytes, in the same pieces, over the same transport."""

        def manifest(one: WeightUpdateRequest) -> dict[str, Any]:
            layout_id = one.layout_id if one.layout is None else one.layout.layout_id
            return one.model_dump(exclude={"layout", "timeout_s", "on_update"}) | {"layout_id": layout_id}

        return manifest(self.request) == manifest(request)

    @property
    def progress(self) -> str:
        """The bytes received so far, in words, for error messages."""
        return f"{self._progress.num_bytes} of {self._progress.all_bytes} bytes"

    @property
    def silent(self) -> bool:
        """True if no bytes have arrived for longer than the timeout of the update's PREPARE."""
        return time.monotonic() - self._progress.at > self.request.timeout_s

    @property
    def failed(self) -> bool:
        """True if the transfer has ended before all bytes arrived."""
        return self.received.done() and self.received.exception() is not None

    @classmethod
    def by_broadcast(cls, request: WeightUpdateRequest, sink: WeightSink, member: GroupMember) -> Self:
        """Receive from rank 0 of the joined group."""
        (endpoint, leave), progress = member.endpoint(), _ByteCount(sink.layout.num_bytes)
        received = in_background_soon(_named(request), partial(_broadcast, endpoint, request, sink, progress))
        return cls(request, "rank 0", "rank 0 of its group to send or leave", received, leave, progress)

    @classmethod
    def by_pull(cls, request: WeightUpdateRequest, sink: WeightSink, source: PullSource) -> Self:
        """Fetch from the parameter servers that the request names."""
        given_up, progress = threading.Event(), _ByteCount(sink.layout.num_bytes)
        groups = request.shards or (request.sources or (),)
        ranges = sink.layout.shards(len(groups), request.bucket_bytes)
        order = PullOrder(
            shards=tuple(Shard(sources, tuple(held)) for sources, held in zip(groups, ranges, strict=True)),
            epoch=request.epoch,
            version=request.version,
            digest=request.digest or "",
            deadline=time.monotonic() + request.timeout_s,
            given_up=given_up,
        )
        received = in_background(_named(request), partial(_pulled, source, order, sink, progress))
        return cls(request, "the parameter server", "its pull to end", received, given_up.set, progress)


def _named(request: WeightUpdateRequest) -> str:
    return f"receive-{request.epoch}.{request.version}"


def _broadcast(
    endpoint: GroupEndpoint, request: WeightUpdateRequest, sink: WeightSink, progress: _ByteCount
) -> Received:
    """Receive piece by piece; the duration counts from the first piece, since the trainer may start later.

    Each piece may take the request's timeout. A rank that forwards pieces from rank 0 and stalls can therefore delay
    this rank only for that time; then this rank can join the next generation of the group.
    """
    from pipelinerl.weights.broadcast.collective import shared_tensor
    from pipelinerl.weights.torch_transfer import OverlappedDigest, stream_for

    if request.pieces_key is not None:  # pieces larger than expected would end this process
        announced = endpoint.expect(request.pieces_key, deadline=time.monotonic() + request.timeout_s)
        if announced != (ours := sink.layout.agreement(request.bucket_bytes)):
            raise UpdateError(
                f"update {request.epoch}.{request.version}: rank 0 is about to send pieces of (layout, bytes) "
                f"{announced[:80]!r}, but PREPARE announced {ours!r}; nothing was received"
            )
    flat = shared_tensor(sink.buffer)
    bounds = sink.layout.buckets(request.bucket_bytes)
    with stream_for(flat.device) as stream:
        digest, began = OverlappedDigest(stream), time.monotonic()
        for bucket, bound in enumerate(bounds):
            for start, end in cut(*bound, request.bucket_bytes):
                try:
                    endpoint.broadcast(flat[start:end], deadline=time.monotonic() + request.timeout_s)
                except PipelineError as error:
                    at = f"update {request.epoch}.{request.version}, {describe_bucket(sink.layout, bucket, bounds)}"
                    raise type(error)(f"{at} from rank 0: {error}; the old weights still serve") from error
                if start == 0:
                    began = time.monotonic()
                digest.append(flat[start:end])
                progress.on_progress(end)
        received = Received(digest.hexdigest(), time.monotonic() - began)
    sink.finish()
    return received


def _pulled(source: PullSource, order: PullOrder, sink: WeightSink, progress: _ByteCount) -> Received:
    began = time.monotonic()
    try:
        digest = source.fetch(order, into=sink.buffer, on_progress=progress.on_progress)
    except PipelineError as error:
        raise type(error)(f"update {order.epoch}.{order.version}: {error}; the old weights still serve") from error
    received = Received(digest, time.monotonic() - began)
    sink.finish()
    return received
