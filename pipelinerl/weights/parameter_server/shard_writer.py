"""`write_shards`: one pass over the trainer's weights; each bucket goes to its shard's server, to all servers
concurrently.

    gather a bucket ─▶ hash it for the whole ─▶ its shard's writer: hash it, send it, while the next one is gathered

Only buckets are staged, never the model; where the server's memory is mapped here, nothing is staged. Each shard is
sealed with the digest of its own bytes and that of the whole version, which is known only after the last bucket.
"""

from __future__ import annotations

import queue
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self, final

import numpy as np
from numpy.typing import NDArray

from inference_contract import routes
from inference_contract.weights import WeightLayout
from pipelinerl.errors import DeadlineError
from pipelinerl.weights.digest import WeightDigest
from pipelinerl.weights.parameter_server import wire
from pipelinerl.weights.parameter_server.connection import ServerClient
from pipelinerl.weights.parameter_server.shared_memory import Attachment
from pipelinerl.weights.parameter_server.wire import Seal, VersionRecord
from pipelinerl.weights.publisher import Publication

Memory = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class ShardsWritten:
    """The digest of the whole version, and those of the shards that were written, by shard number."""

    whole: str
    digests: dict[int, str]


def write_shards(
    publication: Publication,
    writers: Mapping[int, ShardWriter],
    *,
    shards: int,
    bucket_bytes: int,
    deadline: float,
) -> ShardsWritten:
    """Write the shards that have a writer, by number, and seal them.

    Raises:
        UpdateError: the trainer gathers something other than its layout says, or a server failed.
        DeadlineError: the write did not finish by `deadline` (monotonic seconds).
        ContractError: a server reported an error.
    """
    from pipelinerl.weights.broadcast.collective import shared_tensor
    from pipelinerl.weights.broadcast.sender import packed

    layout, whole = publication.layout, WeightDigest()
    bounds = layout.buckets(bucket_bytes)
    buffers = _Buffers(len(writers) + 1, max((end - start for start, end in bounds), default=0))
    owners = _owners(layout, shards, bucket_bytes)
    lent: Memory | None = None

    def room(start: int, end: int) -> Any:
        nonlocal lent
        writer = writers.get(owners[start])
        if writer is not None and writer.target is not None:
            lent = None
            return shared_tensor(writer.target.bytes[start:end])
        lent = buffers.lend(deadline=deadline)
        return shared_tensor(lent[: end - start])

    for (start, end), filled in zip(bounds, packed(layout, publication.weights, bounds, room), strict=True):
        memory = filled.numpy()
        whole.update(memory)
        free = partial(buffers.give_back, lent)
        writer = writers.get(owners[start])
        if writer is None:
            free()
        else:
            writer.put(memory, start, then=free)
        if time.monotonic() > deadline:
            raise DeadlineError(f"the weights were not gathered in time: {end} of {layout.num_bytes} bytes")
    digest = whole.hexdigest()
    sealing = {number: writer.seal(digest) for number, writer in writers.items()}
    return ShardsWritten(digest, {number: sealed.result() for number, sealed in sealing.items()})


@final
class ShardWriter:
    """Writes the bytes of one shard to one server, in order, on a thread that ends with the `with` block.

    The error of a write is raised by a later `put`, or by the future that `seal` returns.
    """

    def __init__(
        self, client: ServerClient, record: VersionRecord, target: Attachment | None, *, deadline: float
    ) -> None:
        """Write what `record` announced into `target`, the server's memory, or by PUT if `target` is None."""
        self.target: Final = target
        self._client = client
        self._record = record
        self._deadline = deadline
        # A single shard is the whole version, whose digest the sender already knows.
        self._digest = WeightDigest() if record.shard.count > 1 else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shard-writer")
        self._last: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    def put(self, memory: Memory, start: int, *, then: Callable[[], None]) -> None:
        """Write `memory` at offset `start`, then call `then`, even if the write fails."""
        before = self._last
        if before is not None and before.done():
            before.result()

        def write() -> None:
            try:
                if before is not None:
                    before.result()
                self._write(memory, start)
            finally:
                then()

        self._last = self._thread.submit(write)

    def seal(self, whole: str) -> Future[str]:
        """Seal the shard after the last `put`; `whole` is the digest of the version.

        Returns:
            The shard's digest, once the server has compared it.
        """
        last = self._last

        def seal() -> str:
            if last is not None:
                last.result()
            seal = Seal(digest=whole if self._digest is None else self._digest.hexdigest(), whole=whole)
            path = wire.SEAL.format(epoch=self._record.epoch, version=self._record.version)
            self._client.call("POST", path, VersionRecord, seal, deadline=self._deadline)
            return seal.digest

        return self._thread.submit(seal)

    def _write(self, memory: Memory, start: int) -> None:
        if self._digest is not None:
            self._digest.update(memory)
        if self.target is None:
            path = routes.WEIGHTS.format(epoch=self._record.epoch, version=self._record.version)
            self._client.write(path, memory.data, start, self._record.num_bytes, deadline=self._deadline)


@final
class _Buffers:
    """Pool of `count` buffers of `num_bytes` each, allocated when first needed."""

    def __init__(self, count: int, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._unmade = count
        self._free: queue.SimpleQueue[Memory] = queue.SimpleQueue()

    def lend(self, *, deadline: float) -> Memory:
        """Return a buffer; wait until one is free. Raises `DeadlineError`."""
        if self._unmade and self._free.empty():
            self._unmade -= 1
            return np.empty(self._num_bytes, np.uint8)
        try:
            return self._free.get(timeout=max(deadline - time.monotonic(), 0.0))
        except queue.Empty:
            raise DeadlineError("the parameter servers did not take the weights in time") from None

    def give_back(self, memory: Memory | None) -> None:
        """Return `memory` to the pool; None is ignored."""
        if memory is not None:
            self._free.put(memory)


def _owners(layout: WeightLayout, shards: int, bucket_bytes: int) -> dict[int, int]:
    """Return the shard of each bucket, by the bucket's first byte."""
    inorder = sorted(
        (*held, number) for number, ranges in enumerate(layout.shards(shards, bucket_bytes)) for held in ranges
    )
    ends = [end for _, end, _ in inorder]
    return {start: inorder[bisect_right(ends, start)][2] for start, _ in layout.buckets(bucket_bytes)}
