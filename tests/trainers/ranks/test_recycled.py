"""Memory blocks are reused, but never while a part of them is referenced."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from pipelinerl.trainers.ranks.recycled import RecycledMemory


def address(array: object) -> int:
    return int(array.__array_interface__["data"][0])  # type: ignore[attr-defined]


def test_unreferenced_block_is_reused() -> None:
    memory = RecycledMemory(1000)
    first = address(memory.take(1000).memory)
    assert {address(memory.take(size).memory) for size in (1000, 7, 999)} == {first}
    assert address(memory.take(1001).memory) != first, "it is not as large"


def test_partly_referenced_block_is_not_reused() -> None:
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


def test_blocks_are_shared_until_all_are_in_use() -> None:
    memory = RecycledMemory(64)
    held = [memory.take(64) for _ in range(4)]
    assert [block.place is not None for block in held] == [True, True, True, False]
    assert len({block.place for block in held}) == 4
    assert memory.take(65).place is not None, "what is larger is shared, too, and given back with it"
    assert memory.take(0).place is None


def test_plain_memory_is_used_when_no_more_files_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", none)
    block = RecycledMemory(64).take(64)
    assert block.place is None and len(block.memory) == 64
