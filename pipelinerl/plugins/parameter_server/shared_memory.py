"""Memory for weights: `SharedMemory` of a parameter server, mappings of it in other processes, and `ReceiveBuffer`.

A server has one segment of shared memory per version, which other processes on the host can map. The segment is a
memfd (an anonymous file in memory) rather than a file in /dev/shm. A memfd has no name to clean up, so
a server killed with -9 leaves nothing behind, and it is not limited to the 64 MB that containers give /dev/shm. Only
processes of the same user that see the server's process can open it, through /proc. A client on another host notices
that the segment's unique name does not match, and falls back to HTTP. On systems other than Linux, a segment is private
memory, and all clients use HTTP.
"""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from inference_contract.weights import cut
from inference_contract.wire import Wire
from pipelinerl.weights.layout import WeightDigest
from pipelinerl.weights.pull import Range

_HAS_MEMFD: Final = hasattr(os, "memfd_create")
_NUMBERS: Final = itertools.count()
#: Maximum number of mapped segments per server: about as many as a server uses in turn.
_KEPT: Final = 4


class SharedMemoryAddress(Wire):
    """The address at which a process on the same host can open a segment."""

    pid: int
    fd: int
    name: str
    num_bytes: int


class SharedMemory:
    """A segment of `num_bytes` of shared memory, freed after its last use. A server reuses it for many versions."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.address: SharedMemoryAddress | None = None
        self._fd = -1
        # The system rejects an empty mapping, but weights may have no bytes.
        length = max(num_bytes, 1)
        if _HAS_MEMFD:
            name = f"pipelinerl-{os.getpid()}-{time.time_ns()}-{next(_NUMBERS)}"
            self._fd = os.memfd_create(name, os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self._fd)
            os.ftruncate(self._fd, length)
            self.address = SharedMemoryAddress(pid=os.getpid(), fd=self._fd, name=name, num_bytes=num_bytes)
        self.bytes: NDArray[np.uint8] = np.frombuffer(mmap.mmap(self._fd, length), np.uint8)[:num_bytes]


@dataclass(frozen=True, slots=True)
class Attachment:
    """A segment of another process, mapped in this one; it stays readable even if the other process dies."""

    address: SharedMemoryAddress
    bytes: NDArray[np.uint8]

    @classmethod
    def to(cls, address: SharedMemoryAddress, *, writable: bool = False) -> Self | None:
        """Map the segment at `address`; return None if another host, container or user owns it."""
        path, name = f"/proc/{address.pid}/fd/{address.fd}", f"/memfd:{address.name} (deleted)"
        try:
            if os.readlink(path) != name:
                return None
            handle = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
        except OSError:
            return None
        try:
            # The server may have reused the descriptor for another file before `open`, so check which file was opened.
            if os.readlink(f"/proc/self/fd/{handle}") != name:
                return None
            how = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            mapped = mmap.mmap(handle, max(address.num_bytes, 1), access=how)
        except (OSError, ValueError):
            return None
        finally:
            os.close(handle)
        return cls(address, np.frombuffer(mapped, np.uint8)[: address.num_bytes])


class Attachments:
    """Cache of mapped segments. A new mapping would cause page faults, which cost more than the copy itself."""

    def __init__(self, *, writable: bool = False) -> None:
        self._writable = writable
        self._by_server: dict[str, dict[str, Attachment]] = {}

    def to(self, server: str, address: SharedMemoryAddress) -> Attachment | None:
        """Return the mapped segment at `address` of `server`; unmap segments of the server's earlier processes."""
        known = self._by_server.pop(server, {})
        alive = {name: attached for name, attached in known.items() if attached.address.pid == address.pid}
        attached = alive.pop(address.name, None) or Attachment.to(address, writable=self._writable)
        if attached is not None:
            newest = list(alive.items())[1 - _KEPT :]
            self._by_server[server] = {**dict(newest), address.name: attached}
        return attached


Part = Range


class ReceiveBuffer:
    """Receives, hashes and counts the bytes for `into` (flat uint8, numpy or torch, on host or GPU)."""

    def __init__(self, into: Any, *, shards: Sequence[Sequence[Range]], on_progress: Callable[[int], None]) -> None:
        """Create the buffer; `shards` has the byte ranges to fill, by shard. The digest covers all ranges in order."""
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
        """Return a shard's missing parts [start, end), in order; the first call divides it into `part_bytes`."""
        if shard not in self._parts:
            self._parts[shard] = [part for start, end in self._shards[shard] for part in cut(start, end, part_bytes)]
        return [part for part in self._parts[shard] if part not in self._there]

    def memory(self, part: Part) -> NDArray[np.uint8]:
        """Return host memory into which the bytes of `part` are to be written."""
        start, end = part
        return np.empty(end - start, np.uint8) if self._host is None else self._host[start:end]

    def landed(self, part: Part, memory: NDArray[np.uint8]) -> None:
        start, end = part
        if self._host is None:
            from pipelinerl.weights.broadcast.collective import shared_tensor

            self._into[start:end].copy_(shared_tensor(memory))
        with self._counting:
            self._there.add(part)
            self._unhashed[start] = end, memory
            self._num_there += end - start
            self._on_progress(self._num_there)
        if self._hashing.acquire(blocking=False):  # if another thread holds the lock, it also hashes this part
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
        while (landed := self._unhashed.pop(self._hashed_to, None)) is not None:
            end, memory = landed
            self._digest.update(memory)
            self._hashed_to = self._follows.get(end, end)
