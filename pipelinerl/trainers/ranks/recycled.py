"""`RecycledMemory`: a few blocks of the host's memory, each used again as soon as nobody holds a part of it.

Memory that is new to a process costs more than what is copied into it: the kernel clears each page when it is first
written. Promise: a block that anything still refers to, an array or a tensor over it, is not handed out.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Final, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from pipelinerl.trainers.ranks.shared_block import Place, shared_block

#: What refers to a block that nobody holds: its tuple, and the call that counts.
_UNHELD: Final = 2
#: One is read, the next is filled already, and one is being filled.
_BLOCKS: Final = 3


class Block(NamedTuple):
    """Bytes, with whatever is in them, and where other ranks of this host may write into them; None: nowhere."""

    memory: NDArray[np.uint8]
    place: Place | None = None


@final
class RecycledMemory:
    """Blocks of `size` bytes, shared with ranks of this host where that can be.

    Who keeps what it is given has memory of its own in the end, as from `numpy.empty`: each that is shared is an open
    file. What is larger than `size` is not used again.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._blocks: list[Block] = []

    def take(self, size: int) -> Block:
        """So many bytes."""
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
        with suppress(OSError):  # not here, or too many files are open
            return Block(*shared_block(size))
    return Block(np.empty(size, np.uint8))
