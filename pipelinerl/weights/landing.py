"""`Landing`: the buffer that a pull fills, part by part and from several threads, hashed while it is still in cache.

Parts are disjoint and cover the whole. One that failed is asked for again, elsewhere; one that has landed is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from pipelinerl.weights.digest import WeightDigest

Part = tuple[int, int]


@final
class Landing:
    """Over `into`, flat uint8: numpy, torch on the host, or torch on a device, which is reached through host memory."""

    def __init__(self, into: Any, *, part_bytes: int, came: Callable[[int], None]) -> None:
        self.num_bytes: Final = len(into)
        self._into = into
        self._came = came
        self._host: NDArray[np.uint8] | None = None
        if str(getattr(into, "device", "cpu")).startswith("cpu"):
            self._host = into if isinstance(into, np.ndarray) else into.numpy()
        edges = [*range(0, self.num_bytes, part_bytes), self.num_bytes]
        self._order: Final[list[Part]] = list(zip(edges, edges[1:], strict=False))  # noqa: RUF007
        self._there: set[Part] = set()
        self._unhashed: dict[Part, NDArray[np.uint8]] = {}
        self._num_there = 0
        self._counting = threading.Lock()
        self._digest = WeightDigest()
        self._hashed = 0
        self._hashing = threading.Lock()

    def missing(self) -> list[Part]:
        """The parts [start, end) that have not landed, in order."""
        return [part for part in self._order if part not in self._there]

    def memory(self, part: Part) -> NDArray[np.uint8]:
        """Host memory to put the bytes of `part` into."""
        start, end = part
        return np.empty(end - start, np.uint8) if self._host is None else self._host[start:end]

    def landed(self, part: Part, memory: NDArray[np.uint8]) -> None:
        """`memory`, which `memory(part)` gave, holds the bytes of `part`."""
        if self._host is None:
            from pipelinerl.weights.collective import shared_tensor

            self._into[part[0] : part[1]].copy_(shared_tensor(memory))
        with self._counting:
            self._there.add(part)
            self._unhashed[part] = memory
            self._num_there += part[1] - part[0]
            self._came(self._num_there)
        if self._hashing.acquire(blocking=False):  # whoever holds it goes on with this part
            try:
                self._hash()
            finally:
                self._hashing.release()

    def digest(self) -> str:
        """Of all bytes; every part must have landed, and nobody may be at work."""
        with self._hashing:
            self._hash()
        return self._digest.hexdigest()

    def _hash(self) -> None:
        """Go on for as far as the parts have landed without a gap."""
        while self._hashed < len(self._order) and self._order[self._hashed] in self._unhashed:
            self._digest.update(self._unhashed.pop(self._order[self._hashed]))
            self._hashed += 1
