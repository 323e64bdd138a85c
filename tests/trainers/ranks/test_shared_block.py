"""Memory that other processes of this host can write into."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from pipelinerl.trainers.ranks import shared_block as shared
from pipelinerl.trainers.ranks.shared_block import Place, opened, shared_block, write_at

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has files without a name")

_OTHER = """
import sys, msgspec, numpy as np
from pipelinerl.trainers.ranks.shared_block import Place, is_here, opened, write_at
place = msgspec.json.decode(sys.argv[1], type=Place)
with opened(place) as file:
    write_at(file, 3, np.arange(5, dtype=np.uint8))
print(is_here(place, bytes([9, 9, 9])), is_here(place, bytes(3)))
"""


def test_another_process_can_write_into_the_block() -> None:
    block, place = shared_block(10)
    block[:] = 9
    other = [sys.executable, "-c", _OTHER, msgspec.json.encode(place).decode()]
    said = subprocess.run(other, check=True, capture_output=True, text=True, timeout=60).stdout
    assert said.split() == ["True", "False"]
    assert block.tolist() == [9, 9, 9, 0, 1, 2, 3, 4, 9, 9]


def test_block_is_freed_when_unreferenced() -> None:
    block, place = shared_block(4096)
    part = block[10:20]
    del block
    with opened(place) as file:
        write_at(file, 10, np.full(3, 7, np.uint8))
    assert part.tolist() == [7, 7, 7, *[0] * 7]
    del part
    with pytest.raises(OSError), opened(place):
        pass


def test_reused_file_descriptor_is_not_written_to() -> None:
    block, place = shared_block(16)
    del block
    other, its = shared_block(16)
    mistaken = msgspec.structs.replace(place, number=its.number)
    with pytest.raises(OSError, match="is not the block that was shared"), opened(mistaken):
        pass
    assert not shared.is_here(mistaken, bytes(8)) and shared.is_here(its, bytes(8))
    assert not other.any()


def test_missing_shared_block_is_reported_as_not_here() -> None:
    assert not shared.is_here(Place(os.getpid(), 10**6, 0, 0), b"")
    assert not shared.is_here(Place(0, 0, 0, 0), bytes(8)), "what a rank 0 says that can share nothing"
