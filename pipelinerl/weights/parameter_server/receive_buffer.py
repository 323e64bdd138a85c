"""`ReceiveBuffer`: the target of a pull, filled in parts by several threads and hashed while parts are still in cache.

Parts are disjoint and cover the ranges of every shard. A part that failed is requested again from another server; a
part that has arrived is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from pipelinerl.weights.digest import WeightDigest
from pipelinerl.weights.pull import Range

Part = Range


@final
class ReceiveBuffer:
    """Buffer over `into`, flat uint8 in numpy or torch; a device is filled through host memory."""

    def __init__(self, into: Any, *, shards: Sequence[Sequence[Range]], on_progress: Callable[[int], None]) -> None:
        """Create the buffer.

        `shards` holds the ranges to fill, by shard; the digest covers all of them in byte order.
        """
        self.num_bytes: Final = len(into)
        self._into = into
        self._on_progress = on_progress
        self._host: NDArray[np.uint8] | None = None
        if str(getattr(into, "device", "cpu")).startswith("cpu"):
            self._host = into if isinstance(into, np.ndarray) else into.numpy()
        self._shards = shards
        self._parts: dict[int, list[Part]] = {}
        self._there: set[Part] = set()
        self._num_there = 0
        self._counting = threading.Lock()
        inorder = sorted(part for ranges in shards for part in ranges)
        self._follows: Final = {before[1]: after[0] for before, after in pairwise(inorder)}
        self._hashed_to = inorder[0][0] if inorder else 0
        self._unhashed: dict[int, tuple[int, NDArray[np.uint8]]] = {}
        self._digest = WeightDigest()
        self._hashing = threading.Lock()

    def missing(self, shard: int, *, part_bytes: int) -> list[Part]:
        """Return the parts [start, end) of a shard that have not arrived, in order. The first call fixes their size."""
        if shard not in self._parts:
            cut = (
                (at, min(at + part_bytes, end))
                for start, end in self._shards[shard]
                for at in range(start, end, part_bytes)
            )
            self._parts[shard] = list(cut)
        return [part for part in self._parts[shard] if part not in self._there]

    def memory(self, part: Part) -> NDArray[np.uint8]:
        """Return host memory for the bytes of `part`."""
        start, end = part
        return np.empty(end - start, np.uint8) if self._host is None else self._host[start:end]

    def landed(self, part: Part, memory: NDArray[np.uint8]) -> None:
        """Record that `memory`, obtained from `memory(part)`, now holds the bytes of `part`."""
        start, end = part
        if self._host is None:
            from pipelinerl.weights.broadcast.collective import shared_tensor

            self._into[start:end].copy_(shared_tensor(memory))
        with self._counting:
            self._there.add(part)
            self._unhashed[start] = end, memory
            self._num_there += end - start
            self._on_progress(self._num_there)
        if self._hashing.acquire(blocking=False):  # the thread that holds the lock hashes this part, too
            try:
                self._hash()
            finally:
                self._hashing.release()

    def digest(self) -> str:
        """Return the digest of all bytes; every part must have arrived, and no thread may be writing."""
        with self._hashing:
            self._hash()
        return self._digest.hexdigest()

    def _hash(self) -> None:
        """Hash all parts that have arrived without a gap before them."""
        while (landed := self._unhashed.pop(self._hashed_to, None)) is not None:
            end, memory = landed
            self._digest.update(memory)
            self._hashed_to = self._follows.get(end, end)
