"""`RecycledMemory`: a few blocks of the host's memory, each used again as soon as nobody holds a part of it.

Memory that is new to a process costs more than what is copied into it: the kernel clears each page when it is first
written. Promise: a block that anything still refers to, an array or a tensor over it, is not handed out.
"""

from __future__ import annotations

import sys
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

#: What refers to a block that nobody holds: the list of blocks, the variable that asks, and the call that counts.
_UNHELD: Final = 3
#: One is read while the next is filled.
_BLOCKS: Final = 2


@final
class RecycledMemory:
    """Blocks of `size` bytes; who keeps what it is given has memory of its own, as from `numpy.empty`."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._blocks: list[NDArray[np.uint8]] = []

    def take(self, size: int) -> NDArray[np.uint8]:
        """So many bytes, with whatever is in them."""
        for block in self._blocks:
            if size <= self._size and sys.getrefcount(block) == _UNHELD:
                return block[:size]
        if size > self._size or len(self._blocks) == _BLOCKS:
            return np.empty(size, np.uint8)
        self._blocks.append(np.empty(self._size, np.uint8))
        return self._blocks[-1][:size]
