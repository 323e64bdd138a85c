"""Memory that other processes of this host can write into."""

import errno
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest
import torch

from pipelinerl.trainers.ranks import shared_block as shared
from pipelinerl.trainers.ranks.shared_block import Place, RecycledMemory, opened, shared_block, write_at

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux has files without a name")

_OTHER = """
import sys, msgspec, numpy as np
from pipelinerl.trainers.ranks.shared_block import Place, is_here, opened, write_at
place = msgspec.json.decode(sys.argv[1], type=Place)
with opened(place) as file:
    write_at(file, 3, np.arange(5, dtype=np.uint8))
print(is_here(place, bytes([9, 9, 9])), is_here(place, bytes(3)))
"""


def test_another_process_can_write_into_a_shared_block():
    block, place = shared_block(10)
    block[:] = 9
    other = [sys.executable, "-c", _OTHER, msgspec.json.encode(place).decode()]
    output = subprocess.run(other, check=True, capture_output=True, text=True, timeout=60).stdout
    assert output.split() == ["True", "False"]
    assert block.tolist() == [9, 9, 9, 0, 1, 2, 3, 4, 9, 9]


def test_shared_block_is_freed_once_no_array_references_any_part_of_it():
    block, place = shared_block(4096)
    part = block[10:20]
    del block
    with opened(place) as file:
        write_at(file, 10, np.full(3, 7, np.uint8))
    assert part.tolist() == [7, 7, 7, *[0] * 7]
    del part
    with pytest.raises(OSError), opened(place):
        pass


def test_freed_shared_block_is_not_written_to_after_its_file_descriptor_was_reused():
    block, place = shared_block(16)
    del block
    other, its = shared_block(16)
    mistaken = msgspec.structs.replace(place, number=its.number)
    with pytest.raises(OSError, match="is not the block that was shared"), opened(mistaken):
        pass
    assert not shared.is_here(mistaken, bytes(8)) and shared.is_here(its, bytes(8))
    assert not other.any()


def test_shared_block_of_another_host_is_detected_as_not_accessible_from_this_host():
    assert not shared.is_here(Place(os.getpid(), 10**6, 0, 0), b"")
    assert not shared.is_here(Place(0, 0, 0, 0), bytes(8)), "what a rank 0 says that can share nothing"


def address(array):
    return int(array.__array_interface__["data"][0])


def test_unreferenced_memory_block_is_reused():
    memory = RecycledMemory(1000)
    first = address(memory.take(1000).memory)
    assert {address(memory.take(size).memory) for size in (1000, 7, 999)} == {first}
    assert address(memory.take(1001).memory) != first, "it is not as large"


def test_memory_block_is_not_reused_while_an_array_references_a_part_of_it():
    memory = RecycledMemory(64)
    tensor = torch.from_numpy(memory.take(64).memory).view(torch.bfloat16)[3:5].view(2)
    held = tensor.view(torch.uint8).numpy()
    where = tensor.untyped_storage().data_ptr()
    del tensor
    taken = [memory.take(64).memory for _ in range(4)]
    assert len({where, *map(address, taken)}) == 5, "who keeps them has memory of its own"
    held[:] = 1
    for each in taken:
        each[:] = 0
    assert held.all()
    del held, each, taken
    assert where in {address(memory.take(64).memory)}


def test_recycled_memory_shares_three_blocks_at_a_time_and_gives_unshared_memory_for_a_fourth():
    memory = RecycledMemory(64)
    held = [memory.take(64) for _ in range(4)]
    assert [block.place is not None for block in held] == [True, True, True, False]
    assert len({block.place for block in held}) == 4
    assert memory.take(65).place is not None, "what is larger is shared, too, and given back with it"
    assert memory.take(0).place is None


def test_memory_block_is_not_shared_if_no_more_files_can_be_opened(monkeypatch):
    def none(name):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none)
    block = RecycledMemory(64).take(64)
    assert block.place is None and len(block.memory) == 64
