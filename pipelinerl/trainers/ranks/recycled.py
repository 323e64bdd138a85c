"""`RecycledMemory`, a few blocks of host memory that are reused once nothing refers to them.

Fresh memory is slow: the kernel clears each page at the first write, which costs more than the copy into it. A block is
never handed out while an array or tensor refers to any part of it.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from pipelinerl.trainers.ranks.shared_block import Place, shared_block

#: Reference count of a free block: the tuple that holds it, and the call that counts references.
_UNHELD: Final = 2
#: Largest number of blocks: one is being read, one is already filled, and one is being filled.
_BLOCKS: Final = 3


class Block(NamedTuple):
    """A byte buffer with arbitrary content.

    Other ranks of this host write into it by `place`, which is None if the memory is not shared.
    """

    memory: NDArray[np.uint8]
    place: Place | None = None


@final
class RecycledMemory:
    """Blocks of `size` bytes, shared with ranks of this host if possible.

    The number of blocks is limited, since each shared block is an open file. While all blocks are in use, requests get
    plain memory, as from `numpy.empty`. Requests larger than `size` are not recycled.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._blocks: list[Block] = []

    def take(self, size: int) -> Block:
        """Return a block of `size` bytes, reused if one is free."""
        if size > self._size:
            return _new(size)
        for block in self._blocks:
            if sys.getrefcount(block.memory) == _UNHELD:
                return Block(block.memory[:size], block.place)
        if len(self._blocks) == _BLOCKS:
            return Block(np.empty(size, np.uint8))
        self._blocks.append(_new(self._size))
        return Block(self._blocks[-1].memory[:size], self._blocks[-1].place)


def _new(size: int) -> Block:
    if size:
        with suppress(OSError):  # shared memory is unsupported here, or too many files are open
            return Block(*shared_block(size))
    return Block(np.empty(size, np.uint8))
