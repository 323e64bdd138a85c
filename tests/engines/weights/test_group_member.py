"""Tests that an engine joins a newer process group without waiting until its previous group is closed."""

import asyncio
import threading

import pytest

from inference_contract.errors import NotPrepared
from inference_contract.weights import Backend, ProcessGroupStatus
from pipelinerl.engines.weights.group_member import GroupMember
from pipelinerl.engines.weights.weight_receiver import WeightReceiver
from tests.engines.weights.test_weight_receiver import Target
from tests.fakes.groups import joining
from tests.patience import PATIENCE_S, SOON_S


class Endpoint:
    """An endpoint whose `close` blocks until the test permits it, like the slow close of a gloo group."""

    def __init__(self):
        self.may_leave, self.left = threading.Event(), threading.Event()

    def expect(self, key, *, deadline):
        return ""

    def broadcast(self, tensor, *, deadline): ...

    def close(self):
        assert self.may_leave.wait(SOON_S)
        self.left.set()


class Endpoints:
    """A factory of `Endpoint`s whose `join` succeeds immediately."""

    def __init__(self):
        self.made = []

    def reaches(self, backend, staging):
        return True

    def buffer(self, staging, num_bytes):
        return bytearray(num_bytes)

    def join(self, request):
        self.made.append(Endpoint())
        return self.made[-1]


async def test_joining_a_process_group_does_not_wait_until_the_previous_group_is_closed():
    endpoints = Endpoints()
    member = GroupMember(endpoints)
    await member.join(joining(1, 1))
    second = asyncio.create_task(member.join(joining(1, 2)))
    answer = await asyncio.wait_for(second, PATIENCE_S)
    assert isinstance(answer, ProcessGroupStatus) and answer.generation == 2
    member.check(group="g", generation=2)
    before, joined = endpoints.made
    assert not before.left.is_set()
    before.may_leave.set()
    assert await asyncio.to_thread(before.left.wait, PATIENCE_S)
    assert member.endpoint()[0] is joined and not joined.left.is_set()
    joined.may_leave.set()
    await member.close()
    assert joined.left.is_set()


async def test_giving_up_a_weight_update_leaves_the_group_without_blocking_the_event_loop():
    endpoints = Endpoints()
    member = GroupMember(endpoints)
    await member.join(joining(1, 1))
    endpoint, give_up = member.endpoint()
    give_up()
    with pytest.raises(NotPrepared, match="was left"):
        member.check(group="g", generation=1)
    closing = asyncio.create_task(member.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    endpoints.made[0].may_leave.set()
    await asyncio.wait_for(closing, PATIENCE_S)
    assert endpoint is endpoints.made[0] and endpoints.made[0].left.is_set()


async def test_nccl_join_waits_until_the_previous_group_is_closed_without_blocking_the_event_loop():
    endpoints = Endpoints()
    receiver = WeightReceiver(Target(), endpoints=endpoints)
    await receiver.init_process_group(joining(1, 1, backend=Backend.NCCL))
    second = asyncio.create_task(receiver.init_process_group(joining(1, 2, backend=Backend.NCCL)))
    await asyncio.sleep(0.05)
    assert not second.done() and len(endpoints.made) == 1
    before = endpoints.made[0]
    before.may_leave.set()
    answer = await asyncio.wait_for(second, PATIENCE_S)
    assert isinstance(answer, ProcessGroupStatus) and answer.generation == 2
    assert before.left.is_set() and len(endpoints.made) == 2
    endpoints.made[1].may_leave.set()
    await receiver.close()
