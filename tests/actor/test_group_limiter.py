"""Tests of the limiter of groups in flight: acquire and release slots, and change the limit while tasks wait."""

import asyncio

from pipelinerl.actor.actor import GroupLimiter


async def test_group_limiter_lets_a_task_take_all_free_slots_and_makes_the_next_task_wait():
    room = GroupLimiter(3)
    assert await room.take(1) == 1 and await room.take() == 2
    waiting = asyncio.create_task(room.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    room.give_back(2)
    assert await waiting == 2


async def test_raised_group_limit_wakes_waiting_tasks_and_lowered_limit_takes_effect_as_groups_end():
    room = GroupLimiter(1)
    assert await room.take() == 1
    waiting = asyncio.create_task(room.take())
    await asyncio.sleep(0)
    room.resize(3)
    assert await waiting == 2
    room.resize(1)
    room.give_back(2)
    waiting = asyncio.create_task(room.take())
    await asyncio.sleep(0)
    assert not waiting.done(), "one place is held and one is allowed"
    room.give_back()
    assert await waiting == 1
