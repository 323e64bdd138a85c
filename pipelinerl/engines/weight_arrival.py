"""`Arrival`: the bytes of one update on their way into an engine's staging buffer, broadcast to it or pulled by it.

They come on a thread of their own, are hashed as they come, and end at the deadline of the PREPARE that asked for them,
whatever the other side does. `give_up` ends them earlier: a pull within moments, a broadcast as soon as rank 0 sends
or leaves. The buffer is free for the next update once `received` is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Self, final

from inference_contract.schemas import WeightLayout, WeightUpdateRequest
from pipelinerl.engines.group_member import GroupMember
from pipelinerl.engines.weight_target import WeightTarget
from pipelinerl.errors import PipelineError
from pipelinerl.weights.background import in_background
from pipelinerl.weights.digest import WeightDigest
from pipelinerl.weights.layout import describe_bucket
from pipelinerl.weights.pull import PullOrder, PullSource


@dataclass(frozen=True, slots=True)
class Received:
    """What came: the digest of all bytes, and the seconds that they took."""

    digest: str
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class Arrival:
    """One update that is being received.

    Attributes:
        request: the PREPARE that asked for it.
        deadline: when it ends at the latest, in monotonic seconds.
        sender: who sends, and `unblock` what ends a wait for them, as errors name them.
        received: the outcome.
        give_up: end it as soon as can be; called when nobody wants it any more, and after a failure.
    """

    request: WeightUpdateRequest
    deadline: float
    sender: str
    unblock: str
    received: Future[Received]
    give_up: Callable[[], None]
    _progress: list[str]

    @property
    def progress(self) -> str:
        """How far it has come, in words."""
        return self._progress[0]

    @property
    def failed(self) -> bool:
        """Has it ended without all bytes?"""
        return self.received.done() and self.received.exception() is not None

    @classmethod
    def by_broadcast(cls, request: WeightUpdateRequest, target: WeightTarget, member: GroupMember) -> Self:
        """Receive from rank 0 of the group that is joined."""
        collective, deadline = member.collective(), time.monotonic() + request.timeout_s
        layout, staging, progress = target.layout, target.staging(), _none_of(target)
        bring = lambda: _broadcast(collective, request, layout, staging, deadline, progress)  # noqa: E731
        received = _started(request, target, bring)
        return cls(
            request, deadline, "rank 0", "rank 0 of its group to send or leave", received, member.leave, progress
        )

    @classmethod
    def by_pull(cls, request: WeightUpdateRequest, target: WeightTarget, source: PullSource) -> Self:
        """Fetch from the parameter servers that the request names."""
        given_up, deadline = threading.Event(), time.monotonic() + request.timeout_s
        staging, progress = target.staging(), _none_of(target)
        order = PullOrder(
            sources=request.sources or (),
            epoch=request.epoch,
            version=request.version,
            digest=request.digest or "",
            deadline=deadline,
            given_up=given_up,
        )
        bring = lambda: _pulled(source, order, staging, progress)  # noqa: E731
        received = _started(request, target, bring)
        return cls(request, deadline, "the parameter server", "its pull to end", received, given_up.set, progress)


def _none_of(target: WeightTarget) -> list[str]:
    return [f"0 of {target.layout.num_bytes} bytes"]


def _started(request: WeightUpdateRequest, target: WeightTarget, bring: Callable[[], Received]) -> Future[Received]:
    def whole() -> Received:
        received = bring()
        target.finish_staging()
        return received

    return in_background(f"receive-{request.epoch}.{request.version}", whole)


def _broadcast(
    group: Any, request: WeightUpdateRequest, layout: WeightLayout, staging: Any, deadline: float, progress: list[str]
) -> Received:
    """Receive bucket after bucket; the time is counted from the first on, since the trainer may come later."""
    from pipelinerl.weights.collective import shared_tensor

    digest, began = WeightDigest(), time.monotonic()
    flat = shared_tensor(staging)
    bounds = layout.buckets(request.bucket_bytes)
    for bucket, (start, end) in enumerate(bounds):
        try:
            group.broadcast(flat[start:end], deadline=deadline)
        except PipelineError as error:
            where = f"update {request.epoch}.{request.version}, {describe_bucket(layout, bucket, bounds)} from rank 0"
            raise type(error)(f"{where}: {error}; the old weights still serve") from error
        if bucket == 0:
            began = time.monotonic()
        digest.update(flat[start:end])
        progress[0] = f"{end} of {layout.num_bytes} bytes"
    return Received(digest.hexdigest(), time.monotonic() - began)


def _pulled(source: PullSource, order: PullOrder, staging: Any, progress: list[str]) -> Received:
    def came(num_bytes: int) -> None:
        progress[0] = f"{num_bytes} of {len(staging)} bytes"

    began = time.monotonic()
    try:
        digest = source.fetch(order, into=staging, came=came)
    except PipelineError as error:
        raise type(error)(f"update {order.epoch}.{order.version}: {error}; the old weights still serve") from error
    return Received(digest, time.monotonic() - began)
