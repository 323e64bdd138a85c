"""Tests that the rollout writer appends each group once; of actors with the same name, only the newest can append."""

import asyncio
from typing import final

import pytest

from pipelinerl.actor.rollouts import RolloutWriter
from pipelinerl.errors import FencedError
from pipelinerl.messages import ROLLOUTS
from pipelinerl.streams.embedded_redis import EmbeddedRedis
from pipelinerl.streams.records import decode_group, encode_group
from pipelinerl.streams.redis_stream import open_stream
from pipelinerl.streams.stream import START
from tests.actor.test_actor import DEADLINE_S, NAME, ScriptedSampler, Watched, none_of, order, until, working
from tests.fakes.rollouts import group

ANOTHER = "another actor is called actor-0; give each a --name of its own"


@pytest.fixture(params=["memory", "redis"])
async def stream(request, tmp_path):
    if request.param == "memory":
        yield await open_stream("memory://", namespace="test")
        return
    with EmbeddedRedis(tmp_path) as server:
        opened = await open_stream(server.url, namespace="test", timeout_s=5.0)
        yield opened
        await opened.close()


async def indices(stream):
    entries = await stream.read({ROLLOUTS + NAME: START}, count=100, block_s=0)
    return [decode_group(entry.payload).index for entry in entries]


@final
class Forgetful:
    """Stream that appends everything twice, like a client that lost the first reply and retries.

    With `trims`, older entries are trimmed between the two appends, as the trainer may do.
    """

    def __init__(self, behind, *, trims=False):
        self._behind = behind
        self._trims = trims

    def __getattr__(self, name):
        return getattr(self._behind, name)

    async def append(self, stream, payloads, *, first_id):
        await self._behind.append(stream, payloads, first_id=first_id)
        if self._trims:
            await self._behind.trim(stream, before=f"{first_id + len(payloads) - 1}-0")
        return await self._behind.append(stream, payloads, first_id=first_id)


async def test_restarted_rollout_writer_appends_after_the_earlier_groups(stream):
    first = await RolloutWriter.begin(stream, actor=NAME)
    await first.append([encode_group(group(1)), encode_group(group(2))])
    await first.append([encode_group(group(3))])
    second = await RolloutWriter.begin(stream, actor=NAME)
    await second.append([encode_group(group(4))])
    assert await indices(stream) == [1, 2, 3, 4]


@pytest.mark.parametrize(("trims", "kept"), [(False, [1, 2, 3]), (True, [3])])
async def test_append_repeated_after_a_lost_reply_is_not_mistaken_for_another_actors_append(stream, trims, kept):
    """A writer repeats an append whose reply was lost, even after the trainer has trimmed some of its groups."""
    partition = await RolloutWriter.begin(Forgetful(stream, trims=trims), actor=NAME)
    await partition.append([encode_group(group(1)), encode_group(group(2))])
    await partition.append([encode_group(group(3))])
    assert await indices(stream) == kept


@pytest.mark.parametrize("is_trimmed", [False, True])
async def test_replaced_actor_cannot_append_once_its_replacement_has_appended_a_group(stream, is_trimmed):
    """A suspended actor that resumes can append groups only until its replacement has appended one."""
    earlier = await RolloutWriter.begin(stream, actor=NAME)
    later = await RolloutWriter.begin(stream, actor=NAME)
    await earlier.append([encode_group(group(1))])
    await later.append([encode_group(group(2))])
    if is_trimmed:  # by the trainer
        await stream.trim(ROLLOUTS + NAME, before=f"{later.number}-0")
    with pytest.raises(FencedError, match=ANOTHER):
        await earlier.append([encode_group(group(3))])
    await later.append([encode_group(group(4))])
    assert await indices(stream) == ([4] if is_trimmed else [1, 2, 4])


async def test_second_actor_cannot_append_under_an_entry_number_that_the_first_has_used(stream):
    """Both actors may begin at the same entry number if the clock of the second one is behind."""
    first, second = (RolloutWriter(stream, actor=NAME, number=7) for _ in range(2))
    await first.append([encode_group(group(1))])
    with pytest.raises(FencedError, match=ANOTHER):
        await second.append([encode_group(group(2))])


async def test_replaced_actor_does_not_acknowledge_a_prompt_order_whose_group_it_could_not_append():
    """An acknowledged order whose group was not appended would be lost."""
    watched, sampler = Watched(), ScriptedSampler()
    sampler.gate.clear()
    await watched.order(order(1))

    async def request_sent():
        return len(sampler.requests) == 1

    async with working(watched, sampler) as (_, task):
        await until(request_sent)
        other = await RolloutWriter.begin(watched.stream, actor=NAME)
        await other.append([encode_group(group(0))])
        sampler.gate.set()
        with pytest.raises(ExceptionGroup) as ended:
            await asyncio.wait_for(task, DEADLINE_S)
    assert ended.group_contains(FencedError, match=ANOTHER)
    assert await watched.unacknowledged() == 1
    async with working(watched, ScriptedSampler()):
        assert await until(lambda: none_of(watched.unacknowledged()))
    assert await indices(watched.stream) == [0, 1]
