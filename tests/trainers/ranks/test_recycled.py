"""Memory that is used again, and never while somebody holds a part of it."""

from __future__ import annotations

import torch

from pipelinerl.trainers.ranks.recycled import RecycledMemory


def address(array: object) -> int:
    return int(array.__array_interface__["data"][0])  # type: ignore[attr-defined]


def test_a_block_that_nobody_holds_is_used_again() -> None:
    memory = RecycledMemory(1000)
    first = address(memory.take(1000))
    assert {address(memory.take(size)) for size in (1000, 7, 999)} == {first}
    assert address(memory.take(1001)) != first, "it is not as large"


def test_a_block_of_which_a_part_is_held_is_not() -> None:
    memory = RecycledMemory(64)
    tensor = torch.from_numpy(memory.take(64)).view(torch.bfloat16)[3:5].view(2)
    held = tensor.view(torch.uint8).numpy()
    where = tensor.untyped_storage().data_ptr()
    del tensor
    taken = [memory.take(64) for _ in range(4)]
    assert len({where, *map(address, taken)}) == 5, "who keeps them has memory of its own"
    held[:] = 1
    for each in taken:
        each[:] = 0
    assert held.all()
    del held, each, taken
    assert where in {address(memory.take(64))}
