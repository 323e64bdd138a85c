"""Each requested group is trained exactly once, whatever dies; two plausible but wrong trainers are caught.

This is a toy pipeline over the real streams. An actor claims orders (requests), appends a group for each under an id it
chooses, then acknowledges the order. A trainer saves the groups that its weights have seen in checkpoints; later
effects are lost when it dies. Deaths are exceptions at points drawn from a seed, and `kill -9` of a real server.

    by offset                  read after the checkpoint's offset ─ drop duplicates ─ train ─ checkpoint      right
    ack before training        claim ─ acknowledge ─ train ─ checkpoint                                       loses
    ack after the checkpoint   claim ─ train ─ checkpoint ─ acknowledge                                       repeats
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from dataclasses import dataclass, replace

import pytest

from pipelinerl.rng import generator
from pipelinerl.streams.embedded_redis import EmbeddedRedis
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.streams.records import decode_group, decode_message, encode_group, encode_message
from pipelinerl.streams.redis_stream import open_stream
from pipelinerl.streams.stream import START, fresh_number
from tests.fakes.rollouts import group
from tests.patience import PATIENCE_S

PROMPTS, ROLLOUTS = "prompts", "rollouts:a0"
IDLE_S = 0.05


class Death(Exception):
    """Raised at a point where a simulated process dies."""


class RandomDeaths:
    """Decides when a role dies (at each point with probability 0.1, while deaths are left), and counts empty polls."""

    def __init__(self, seed, role, deaths):
        self._random = generator(seed, "fate", role)
        self.deaths_left = deaths
        self.empty_polls = 0

    @property
    def is_quiet(self):
        # These empty polls outlast the time after which an unacknowledged entry can be claimed again.
        return not self.deaths_left and self.empty_polls >= 15

    def counted(self, entries):
        self.empty_polls = 0 if entries else self.empty_polls + 1
        return entries

    def point(self):
        if self.deaths_left and self._random.random() < 0.1:
            self.deaths_left -= 1
            raise Death


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A trainer's checkpoint: the groups that its weights have seen, in order, and the offset to read from next."""

    trained: tuple[str, ...] = ()
    offset: str = START
    previous_offset: str = START


@dataclass(slots=True)
class Disk:
    """The newest checkpoint, replaced atomically."""

    checkpoint: Checkpoint = Checkpoint()


async def issue(streams, orders):
    """Append the orders in several requests, like the controller; each request is sent twice, as after a lost reply."""
    for start in range(0, len(orders), 10):
        piece = [encode_message("order", {"id": order}) for order in orders[start : start + 10]]
        for _ in range(2):
            await streams.append(PROMPTS, piece, first_id=start + 1)
        await asyncio.sleep(0.01)


async def actor_life(streams, deaths):
    """Run one life of the actor, which ends only by `Death`."""
    number = fresh_number(await streams.last_id(ROLLOUTS))
    while True:
        entries = deaths.counted(
            await streams.claim(PROMPTS, group="actors", consumer="a0", count=4, block_s=0.02, reclaim_idle_s=IDLE_S)
        )
        deaths.point()
        if not entries:
            continue
        groups = [
            encode_group(replace(group(0), group_id=decode_message(entry.payload).body["id"])) for entry in entries
        ]
        for _ in range(2):  # the second append repeats the first, as after a lost answer
            await streams.append(ROLLOUTS, groups, first_id=number)
        number += len(groups)
        deaths.point()
        await streams.acknowledge(PROMPTS, group="actors", entry_ids=[entry.entry_id for entry in entries])


async def by_offset(streams, disk, deaths):
    """Run one life of the correct trainer; it trims entries that even the previous checkpoint does not need."""
    trained, offset = list(disk.checkpoint.trained), disk.checkpoint.offset
    while True:
        for entry in deaths.counted(await streams.read({ROLLOUTS: offset}, count=3, block_s=0.02)):
            made = decode_group(entry.payload)
            deaths.point()
            if made.group_id not in trained:
                trained.append(made.group_id)
            offset = entry.entry_id
        deaths.point()
        disk.checkpoint = Checkpoint(tuple(trained), offset, disk.checkpoint.offset)
        deaths.point()
        await streams.trim(ROLLOUTS, before=disk.checkpoint.previous_offset)


async def ack_before_training(streams, disk, deaths):
    """Run one life of a flawed trainer, which loses acknowledged groups that are in no checkpoint when it dies."""
    trained = list(disk.checkpoint.trained)
    while True:
        entries = deaths.counted(await claim_rollouts(streams))
        await streams.acknowledge(ROLLOUTS, group="trainer", entry_ids=[entry.entry_id for entry in entries])
        deaths.point()
        for entry in entries:
            made = decode_group(entry.payload)
            if made.group_id not in trained:
                trained.append(made.group_id)
            deaths.point()
        disk.checkpoint = Checkpoint(tuple(trained))


async def ack_after_checkpoint(streams, disk, deaths):
    """Run one life of a flawed trainer, which trains again groups of its checkpoint that it has not acknowledged."""
    trained = list(disk.checkpoint.trained)
    while True:
        entries = deaths.counted(await claim_rollouts(streams))
        for entry in entries:
            deaths.point()
            trained.append(decode_group(entry.payload).group_id)
        disk.checkpoint = Checkpoint(tuple(trained))
        deaths.point()
        await streams.acknowledge(ROLLOUTS, group="trainer", entry_ids=[entry.entry_id for entry in entries])


async def claim_rollouts(streams):
    return await streams.claim(ROLLOUTS, group="trainer", consumer="t0", count=3, block_s=0.02, reclaim_idle_s=IDLE_S)


async def lives(life):
    """Run a role forever: each death is followed by the next life."""
    while True:
        try:
            await life()
        except Death:
            await asyncio.sleep(0)


async def until_quiet(streams, trainer, disk, *, seed, num_orders):
    """Run controller, actor and trainer until all deaths have happened and no role finds work.

    Return the numbers of lost and of repeated orders.
    """
    orders = [f"prompt-{number:06d}" for number in range(num_orders)]
    of_actor, of_trainer = RandomDeaths(seed, "actor", deaths=4), RandomDeaths(seed, "trainer", deaths=6)
    tasks = [
        asyncio.create_task(issue(streams, orders)),
        asyncio.create_task(lives(lambda: actor_life(streams, of_actor))),
        asyncio.create_task(lives(lambda: trainer(streams, disk, of_trainer))),
    ]
    async with asyncio.timeout(PATIENCE_S):
        while not (tasks[0].done() and all(each.is_quiet for each in (of_actor, of_trainer))):
            await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(end) for end in ended] == [type(None), asyncio.CancelledError, asyncio.CancelledError], ended
    trained = Counter(disk.checkpoint.trained)
    assert set(trained) <= set(orders)
    return len(orders) - len(trained), sum(count > 1 for count in trained.values())


@pytest.mark.parametrize(
    ("trainer", "loses", "repeats"),
    [(by_offset, False, False), (ack_before_training, True, False), (ack_after_checkpoint, False, True)],
)
async def test_only_a_trainer_that_resumes_at_its_checkpoints_offset_trains_each_group_once(trainer, loses, repeats):
    runs = [until_quiet(MemoryStream(), trainer, Disk(), seed=seed, num_orders=40) for seed in range(6)]
    outcomes = await asyncio.gather(*runs)
    assert (any(lost for lost, _ in outcomes), any(repeated for _, repeated in outcomes)) == (loses, repeats)


async def test_each_requested_group_is_trained_once_although_the_stream_server_is_killed(tmp_path):
    """With `appendfsync always`, everything acknowledged survives, including each reader's position."""
    random = generator(0, "kills")
    with EmbeddedRedis(tmp_path, syncs_always=True) as server:
        streams = await open_stream(server.url, namespace="run", timeout_s=PATIENCE_S)
        disk = Disk()
        async with asyncio.TaskGroup() as tasks:
            ending = tasks.create_task(until_quiet(streams, by_offset, disk, seed=1, num_orders=400))
            for kills in range(6):
                while len(disk.checkpoint.trained) < 50 * kills:
                    await asyncio.sleep(0.005)
                await asyncio.sleep(random.uniform(0, 0.03))
                os.kill(server.pid, signal.SIGKILL)
                await asyncio.sleep(0.03)
                server.start()
            assert len(disk.checkpoint.trained) < 400, "killed only after the end"
        await streams.close()
    assert ending.result() == (0, 0)
