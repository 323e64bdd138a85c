"""Memory of rank 0 that other ranks on its host can write to: an anonymous file, opened through /proc.

The other ranks write to the file without mapping it, so the block adds nothing to their own memory. This costs a fifth
of a local connection. Only Linux has such files. Ranks of other hosts, users or containers cannot open the file;
`is_here` tests this.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from mmap import mmap
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray


class Place(msgspec.Struct, frozen=True):
    """The location of a block for other processes of this host: owning process, file descriptor, and file identity."""

    process: int
    number: int
    device: int
    inode: int


def shared_block(size: int) -> tuple[NDArray[np.uint8], Place]:
    """Create a block of `size` bytes, freed when nothing in this process refers to it. Raises OSError if
    unsupported.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("only Linux has files without a name")
    file = os.memfd_create("pipelinerl gathering")
    with ExitStack() as given_up:
        given_up.callback(os.close, file)
        os.ftruncate(file, size)
        block = np.frombuffer(mmap(file, size), np.uint8)
        stat = os.fstat(file)
        given_up.pop_all()
    weakref.finalize(block, os.close, file)
    return block, Place(os.getpid(), file, stat.st_dev, stat.st_ino)


@contextmanager
def opened(place: Place) -> Iterator[int]:
    """Open a block's file for `write_at`. Raises OSError if the file is missing or is not that block."""
    path = Path("/proc") / str(place.process) / "fd" / str(place.number)
    file = os.open(path, os.O_RDWR)
    try:
        stat = os.fstat(file)
        if (stat.st_dev, stat.st_ino) != (place.device, place.inode):
            raise OSError(f"{path} is not the block that was shared")
        yield file
    finally:
        os.close(file)


def write_at(file: int, start: int, data: NDArray[np.uint8]) -> None:
    """Write `data` to the block's file, beginning at byte `start`."""
    left = data.data
    while left:
        written = os.pwrite(file, left, start)
        start, left = start + written, left[written:]


def is_here(place: Place, content: bytes) -> bool:
    """Return True if this process can open the block and reads the expected content."""
    try:
        with opened(place) as file:
            return os.pread(file, len(content), 0) == content
    except OSError:
        return False
