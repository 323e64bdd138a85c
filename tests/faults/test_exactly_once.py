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
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import numpy as np

from pipelinerl.rng import generator
from pipelinerl.streams.embedded_redis import EmbeddedRedis
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.streams.records import decode_group, decode_message, encode_group, encode_message
from pipelinerl.streams.redis_stream import open_stream
from pipelinerl.streams.stream import START, Stream, fresh_number
from pipelinerl.types import Outcome, Rollout, RolloutGroup, Turn, Verdict, VersionSpan
from tests.patience import PATIENCE_S

PROMPTS, ROLLOUTS = "prompts", "rollouts:a0"
IDLE_S = 0.05


class Death(Exception):
    """Raised at a point where a simulated process dies."""


#: Number of empty polls in a row that take longer than it takes until an unacknowledged entry can be claimed again.
QUIET_POLLS = 15


class RandomDeaths:
    """Decides when a role dies (at each point with probability 0.1, while deaths are left), and counts empty polls."""

    def __init__(self, seed, role, deaths):
        self._random = generator(seed, "fate", role)
        self.deaths_left = deaths
        self.empty_polls = 0

    @property
    def is_quiet(self):
        return not self.deaths_left and self.empty_polls >= QUIET_POLLS

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


Trainer = Callable[[Stream, Disk, RandomDeaths], Awaitable[None]]


def group_of(order_id):
    one = Turn(
        context_token_ids=np.arange(3, dtype=np.int32),
        token_ids=np.arange(2, dtype=np.int32),
        behavior_logprobs=np.zeros(2, dtype=np.float32),
        spans=(VersionSpan(0, 2),),
    )
    verdict = Verdict(outcome=Outcome.CORRECT, reward=1.0)
    rollout = Rollout(turns=(one,), verdict=verdict, finish_reason="stop", temperature=1.0)
    return RolloutGroup(group_id=order_id, index=0, domain="toy", actor="a0", rollouts=(rollout,) * 2)


async def issue(streams, orders):
    """Append the orders in several requests, like the controller; each request is sent twice, as after a lost reply."""
    for start in range(0, len(orders), 10):
        piece = [encode_message("order", {"id": order}) for order in orders[start : start + 10]]
        for _ in range(2):
            await streams.append(PROMPTS, piece, first_id=start + 1)
        await asyncio.sleep(0.01)


async def actor_life(streams, deaths_of_role):
    """Run one life of the actor, which ends only by `Death`."""
    number = fresh_number(await streams.last_id(ROLLOUTS))
    while True:
        entries = deaths_of_role.counted(
            await streams.claim(PROMPTS, group="actors", consumer="a0", count=4, block_s=0.02, reclaim_idle_s=IDLE_S)
        )
        deaths_of_role.point()
        if not entries:
            continue
        groups = [encode_group(group_of(decode_message(entry.payload).body["id"])) for entry in entries]
        for _ in range(2):  # the second append repeats the first, as after a lost answer
            await streams.append(ROLLOUTS, groups, first_id=number)
        number += len(groups)
        deaths_of_role.point()
        await streams.acknowledge(PROMPTS, group="actors", entry_ids=[entry.entry_id for entry in entries])


async def by_offset(streams, disk, deaths_of_role):
    """Run one life of the correct trainer; it trims entries that even the previous checkpoint does not need."""
    trained, offset = list(disk.checkpoint.trained), disk.checkpoint.offset
    while True:
        for entry in deaths_of_role.counted(await streams.read({ROLLOUTS: offset}, count=3, block_s=0.02)):
            group = decode_group(entry.payload)
            deaths_of_role.point()
            if group.group_id not in trained:
                trained.append(group.group_id)
            offset = entry.entry_id
        deaths_of_role.point()
        disk.checkpoint = Checkpoint(tuple(trained), offset, disk.checkpoint.offset)
        deaths_of_role.point()
        await streams.trim(ROLLOUTS, before=disk.checkpoint.previous_offset)


async def ack_before_training(streams, disk, deaths_of_role):
    """Run one life of a flawed trainer, which loses acknowledged groups that are in no checkpoint when it dies."""
    trained = list(disk.checkpoint.trained)
    while True:
        entries = deaths_of_role.counted(await claim_rollouts(streams))
        await streams.acknowledge(ROLLOUTS, group="trainer", entry_ids=[entry.entry_id for entry in entries])
        deaths_of_role.point()
        for entry in entries:
            group = decode_group(entry.payload)
            if group.group_id not in trained:
                trained.append(group.group_id)
            deaths_of_role.point()
        disk.checkpoint = Checkpoint(tuple(trained))


async def ack_after_checkpoint(streams, disk, deaths_of_role):
    """Run one life of a flawed trainer, which trains again groups of its checkpoint that it has not acknowledged."""
    trained = list(disk.checkpoint.trained)
    while True:
        entries = deaths_of_role.counted(await claim_rollouts(streams))
        for entry in entries:
            deaths_of_role.point()
            trained.append(decode_group(entry.payload).group_id)
        disk.checkpoint = Checkpoint(tuple(trained))
        deaths_of_role.point()
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


@dataclass(slots=True)
class Run:
    """A toy run: controller, actor and trainer over one stream server, with deaths of actor and trainer."""

    streams: Stream
    trainer: Trainer
    seed: int
    num_orders: int
    disk: Disk = field(default_factory=Disk)

    async def until_quiet(self, *, deadline_s=PATIENCE_S):
        """Run until all deaths have happened and no role finds work; return the numbers of lost and repeated orders."""
        orders = [f"prompt-{number:06d}" for number in range(self.num_orders)]
        deaths_by_role = [RandomDeaths(self.seed, "actor", deaths=4), RandomDeaths(self.seed, "trainer", deaths=6)]
        tasks = [
            asyncio.create_task(issue(self.streams, orders)),
            asyncio.create_task(lives(lambda: actor_life(self.streams, deaths_by_role[0]))),
            asyncio.create_task(lives(lambda: self.trainer(self.streams, self.disk, deaths_by_role[1]))),
        ]
        deadline = time.monotonic() + deadline_s
        while (
            not (tasks[0].done() and all(deaths_of_role.is_quiet for deaths_of_role in deaths_by_role))
            and time.monotonic() < deadline
        ):
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ended] == [type(None), asyncio.CancelledError, asyncio.CancelledError], ended
        trained = Counter(self.disk.checkpoint.trained)
        assert set(trained) <= set(orders)
        return len(orders) - len(trained), sum(count > 1 for count in trained.values())


async def outcomes(trainer):
    """Run the toy pipeline with several seeds; return for each seed the numbers of lost and of repeated orders."""
    runs = [Run(MemoryStream(), trainer, seed, num_orders=40) for seed in range(6)]
    outcome_pairs = await asyncio.gather(*(run.until_quiet() for run in runs))
    return [lost for lost, _ in outcome_pairs], [doubled for _, doubled in outcome_pairs]


async def test_trainer_that_resumes_at_its_checkpoints_stream_offset_trains_each_group_once():
    assert await outcomes(by_offset) == ([0] * 6, [0] * 6)


async def test_trainer_that_acknowledges_groups_before_training_loses_groups():
    lost, doubled = await outcomes(ack_before_training)
    assert any(lost)
    assert not any(doubled)


async def test_trainer_that_acknowledges_groups_after_the_checkpoint_trains_groups_twice():
    lost, doubled = await outcomes(ack_after_checkpoint)
    assert not any(lost)
    assert any(doubled)


async def test_each_requested_group_is_trained_once_although_the_stream_server_is_killed(tmp_path):
    """With `appendfsync always`, everything acknowledged survives, including each reader's position."""
    random = generator(0, "kills")
    with EmbeddedRedis(tmp_path, syncs_always=True) as server:
        streams = await open_stream(server.url, namespace="run", timeout_s=PATIENCE_S)
        run = Run(streams, by_offset, seed=1, num_orders=400)
        async with asyncio.TaskGroup() as tasks:
            ending = tasks.create_task(run.until_quiet())
            for kills in range(6):
                while len(run.disk.checkpoint.trained) < 50 * kills:
                    await asyncio.sleep(0.005)
                await asyncio.sleep(random.uniform(0, 0.03))
                os.kill(server.pid, signal.SIGKILL)
                await asyncio.sleep(0.03)
                server.start()
            assert len(run.disk.checkpoint.trained) < 400, "killed only after the end"
        await streams.close()
    assert ending.result() == (0, 0)
