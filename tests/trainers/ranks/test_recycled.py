"""Memory that is used again, and never while somebody holds a part of it."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from pipelinerl.trainers.ranks.recycled import RecycledMemory


def address(array: object) -> int:
    return int(array.__array_interface__["data"][0])  # type: ignore[attr-defined]


def test_a_block_that_nobody_holds_is_used_again() -> None:
    memory = RecycledMemory(1000)
    first = address(memory.take(1000).memory)
    assert {address(memory.take(size).memory) for size in (1000, 7, 999)} == {first}
    assert address(memory.take(1001).memory) != first, "it is not as large"


def test_a_block_of_which_a_part_is_held_is_not() -> None:
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


def test_what_ranks_may_write_into_is_told_until_all_is_held() -> None:
    memory = RecycledMemory(64)
    held = [memory.take(64) for _ in range(4)]
    assert [block.place is not None for block in held] == [True, True, True, False]
    assert len({block.place for block in held}) == 4
    assert memory.take(65).place is not None, "what is larger is shared, too, and given back with it"
    assert memory.take(0).place is None


def test_a_process_that_may_open_no_more_files_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none)
    block = RecycledMemory(64).take(64)
    assert block.place is None and len(block.memory) == 64
