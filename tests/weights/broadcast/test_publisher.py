"""Weights are broadcast to real engines over HTTP and gloo, some of which reject them, are unreachable, or die."""

import asyncio
import os
import signal
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

from inference_contract.errors import Overloaded
from inference_contract.schemas import ChatCompletionRequest
from inference_contract.weights import OnUpdate, UpdatePhase
from pipelinerl import rng
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.errors import AddressError, ReachedNoEngine, UpdateError
from pipelinerl.weights import grace
from pipelinerl.weights.broadcast.collective import Collective
from pipelinerl.weights.broadcast.publisher import BroadcastPublisher
from pipelinerl.weights.publisher import Publication
from tests.fakes.scripted_engine import LAYOUT, application
from tests.fakes.served import as_process, in_thread
from tests.patience import PATIENCE_S, SOON_S

BUCKET_BYTES = 128  # the weights then have two buckets, one of which has only the bias


def weights(version):
    def source():
        for parameter in LAYOUT.parameters:
            values = rng.generator(version, parameter.name).normal(size=parameter.shape)
            yield parameter.name, values.astype(np.float32)

    return source


def publication(version, engines, **fields):
    defaults = {"epoch": 1, "membership": 1, "weights": weights(version), "timeout_s": 24.0}
    return Publication(version=version, layout=LAYOUT, engines=engines, **(defaults | fields))


async def halted(publisher, engines, *, bucket=1, **fields):
    """Publish weights, and wait until their source pauses before a bucket; return the publication and what ends it."""
    sending, release = threading.Event(), threading.Event()

    def source():
        for row, item in enumerate(weights(2)()):
            if row == bucket and not sending.is_set():
                sending.set()
                assert release.wait(PATIENCE_S)
            yield item

    update = asyncio.create_task(publisher.publish(publication(engines=engines, weights=source, **fields)))
    await asyncio.to_thread(sending.wait, PATIENCE_S)
    return update, release


class Recording:
    """A client of engines that records requests, and sends those for an engine in `moved` to its new address."""

    def __init__(self, client):
        self.client = client
        self.joins = []
        self.updates = []
        self.moved = {}
        self.overloaded = set()
        self.frozen_at = {}

    async def init_process_group(self, url, request):
        self.joins.append(request)
        if url in self.overloaded:
            raise Overloaded("16 joins wait for their peers already; wait until one has ended")
        return await self.client.init_process_group(self.moved.get(url, url), request)

    async def request_weight_update(self, url, request):
        self.updates.append((url, request))
        if self.frozen_at.get(url) == request.phase:
            self.frozen_at[url] = UpdatePhase.ABORT  # a frozen engine does not answer the next request either
            await asyncio.sleep(PATIENCE_S)
        return await self.client.request_weight_update(self.moved.get(url, url), request)


@pytest.fixture
async def control():
    async with EngineClient() as client:
        yield Recording(client)


@pytest.fixture
async def publisher(control):
    made = BroadcastPublisher(control, bucket_bytes=BUCKET_BYTES)
    yield made
    await made.close()


@pytest.fixture
def engines():
    with ExitStack() as stack:
        yield [stack.enter_context(in_thread(application())) for _ in range(2)]


async def greedy(control, url):
    request = ChatCompletionRequest(
        prompt_token_ids=[3, 5], max_tokens=12, temperature=0.0, return_token_ids=True, seed=0
    )
    return (await control.client.chat(url, request)).choices[0].token_ids or []


async def serving(control, url):
    health = await control.client.health(url)
    return health.epoch, health.model_version


async def test_new_weight_group_is_formed_if_the_set_of_engines_changes(publisher, control, engines):
    await publisher.publish(publication(1, engines[:1]))
    await publisher.publish(publication(2, engines, membership=2))
    await publisher.publish(publication(3, engines, membership=2))
    prepares = [request for _, request in control.updates if request.phase == "prepare"]
    assert [request.layout is not None for request in prepares] == [True, False, True, False, False], "sent once each"
    generations = [request.generation for request in control.joins]
    assert len(generations) == 3 and generations[0] < generations[1] == generations[2]
    assert [await serving(control, url) for url in engines] == [(1, 3), (1, 3)]


async def test_publication_without_engines_still_returns_the_digest_of_the_weights(publisher, engines):
    alone = await publisher.publish(publication(1, []))
    assert alone.pauses_s == {} == alone.failed
    served = await publisher.publish(publication(1, engines))
    assert alone.digest == served.digest


async def test_engine_that_already_serves_the_broadcast_version_is_skipped(publisher, control, engines):
    await publisher.publish(publication(4, engines[:1]))
    report = await publisher.publish(publication(4, engines, membership=2))
    assert report.failed == {} and report.pauses_s[engines[0]] == 0.0
    assert [await serving(control, url) for url in engines] == [(1, 4), (1, 4)]
    again = await publisher.publish(publication(4, engines, membership=2))
    assert again.digest == report.digest and again.failed == {}


async def test_engine_that_rejects_a_weight_version_is_reported_and_other_engines_are_updated(
    publisher, control, engines
):
    """An engine with another model, or of another run, must not keep the other engines from getting the weights."""
    await publisher.publish(publication(9, engines[1:]))
    report = await publisher.publish(publication(5, engines, membership=2))
    assert set(report.pauses_s) == {engines[0]}
    assert report.failed[engines[1]].startswith("refused: ") and "must come after 1.9" in report.failed[engines[1]]
    assert [await serving(control, url) for url in engines] == [(1, 5), (1, 9)]
    with pytest.raises(UpdateError, match=r"reached no engine: .*refused: .*must come after 1\.9"):
        await publisher.publish(publication(5, engines[1:], membership=3))
    report = await publisher.publish(publication(10, engines, membership=4))
    assert report.failed == {}, "the publication after a rejected one must succeed"


async def test_publications_with_an_unreachable_engine_leave_no_pending_joins_at_other_engines(
    publisher, control, engines
):
    """There are 20 publications. If each left a pending join, an engine would reject the 17th join."""
    for version in range(1, 21):
        report = await publisher.publish(publication(version, ["http://127.0.0.1:9", *engines], membership=version))
        assert set(report.pauses_s) == set(engines), report.failed
    assert list(report.failed) == ["http://127.0.0.1:9"] and "did not join" in report.failed["http://127.0.0.1:9"]
    for url in engines:
        assert await serving(control, url) == (1, 20)


async def test_engine_that_rejects_a_join_because_of_pending_joins_is_reported_as_blameless(
    publisher, control, engines
):
    control.overloaded = {engines[1]}
    report = await publisher.publish(publication(1, ["http://127.0.0.1:9", *engines]))
    assert set(report.pauses_s) == {engines[0]}
    assert (set(report.failed), report.blameless) == ({"http://127.0.0.1:9", engines[1]}, {engines[1]})
    with pytest.raises(ReachedNoEngine) as alone:
        await publisher.publish(publication(2, engines[1:], membership=2))
    assert alone.value.blameless == {engines[1]}
    control.overloaded = set()
    assert (await publisher.publish(publication(2, engines, membership=3))).blameless == frozenset()


async def test_publication_fails_with_an_error_that_names_each_engine_if_all_are_unreachable(publisher):
    urls = ["http://127.0.0.1:9", "http://127.0.0.1:7"]
    with pytest.raises(UpdateError, match=r"weights 1\.1 reached no engine: .*:9 .*:7 "):
        await publisher.publish(publication(1, urls))


async def test_broadcast_fails_if_the_trainer_gathers_parameters_that_differ_from_the_announced_layout(
    publisher, control, engines
):
    def wrong():
        yield "table.weight", np.zeros((32, 32), np.float32)
        yield "table.other", np.zeros(32, np.float32)

    with pytest.raises(UpdateError, match=r"must gather \('table.bias'.* it gathered \('table.other'"):
        await publisher.publish(publication(1, engines, weights=wrong))
    assert [await serving(control, url) for url in engines] == [(0, 0), (0, 0)]
    assert (await publisher.publish(publication(1, engines))).failed == {}


async def test_engines_keep_generating_tokens_during_a_slow_broadcast(publisher, control, engines):
    update, release = await halted(publisher, engines, version=1, on_update=OnUpdate.DRAIN)
    before = await greedy(control, engines[0])
    assert await serving(control, engines[0]) == (0, 0) and len(before) > 0
    release.set()
    assert (await update).failed == {}
    assert await serving(control, engines[0]) == (1, 1)


@pytest.mark.parametrize("death", [signal.SIGKILL, signal.SIGSTOP])
async def test_other_engines_get_the_weights_if_an_engine_is_killed_or_suspended_during_a_broadcast(
    publisher, control, engines, death
):
    """The other engines form a new weight group, through which they get the weights."""
    timeout_s = 21.0
    with as_process("tests.fakes.scripted_engine") as (victim, process):
        # Publish once before the test, since the engine imports torch at its first join, which takes seconds.
        warm = await publisher.publish(publication(1, [victim, *engines], timeout_s=PATIENCE_S))
        assert warm.failed == {}
        update, release = await halted(publisher, [victim, *engines], version=2, timeout_s=timeout_s)
        os.kill(process.pid, death)
        began = time.monotonic()
        release.set()
        report = await update
        assert set(report.pauses_s) == set(engines) and list(report.failed) == [victim]
        assert report.failed[victim]
        assert [await serving(control, url) for url in engines] == [(1, 2), (1, 2)]
        assert time.monotonic() - began < timeout_s + SOON_S
        assert (await publisher.publish(publication(3, engines, membership=2))).failed == {}
    one, two = [await greedy(control, url) for url in engines]
    assert one == two


@pytest.mark.parametrize("phase", [UpdatePhase.PREPARE, UpdatePhase.COMMIT])
async def test_other_engines_get_the_weights_without_waiting_for_an_engine_that_freezes(
    publisher, control, engines, monkeypatch, phase
):
    monkeypatch.setattr(grace, "_LONGEST_FLOOR_S", 0.2)
    await publisher.publish(publication(1, engines))
    control.frozen_at[engines[0]] = phase
    began = time.monotonic()
    report = await publisher.publish(publication(2, engines, timeout_s=PATIENCE_S))
    assert set(report.pauses_s) == {engines[1]} and list(report.failed) == [engines[0]]
    assert "did not answer" in report.failed[engines[0]] and not report.blameless
    assert time.monotonic() - began < SOON_S, "the group's timeout would be longer"
    assert await serving(control, engines[1]) == (1, 2)


async def test_engine_restarted_during_a_broadcast_gets_the_weights(publisher, control, engines):
    """The restarted engine answers at the same URL after the broadcast has failed, so that no engine seems lost."""
    with as_process("tests.fakes.scripted_engine") as (victim, process), in_thread(application()) as again:
        warm = await publisher.publish(publication(1, [victim, *engines], timeout_s=PATIENCE_S))
        assert warm.failed == {}
        update, release = await halted(publisher, [victim, *engines], bucket=0, version=2, timeout_s=21.0)
        os.kill(process.pid, signal.SIGSTOP)  # makes peers wait, as they sometimes do for a killed process
        control.moved[victim] = again
        release.set()
        assert (await update).failed == {}
        assert [await serving(control, url) for url in (again, *engines)] == [(1, 2)] * (1 + len(engines))


async def test_rendezvous_of_the_weight_group_moves_to_an_address_that_all_engines_reach(
    publisher, control, engines, outward
):
    """The engines stay the same; only the address at which the trainer reaches one of them changes."""
    await publisher.publish(publication(1, engines))
    assert {join.rendezvous_host for join in control.joins} == {"127.0.0.1"}
    elsewhere = engines[1].replace("127.0.0.1", outward)
    control.joins.clear()
    control.moved[elsewhere] = engines[1]
    report = await publisher.publish(publication(2, [engines[0], elsewhere], membership=2))
    assert report.failed == {} and {join.rendezvous_host for join in control.joins} == {outward}
    control.joins.clear()
    await publisher.publish(publication(3, engines, membership=3))
    assert {join.rendezvous_host for join in control.joins} == {"127.0.0.1"}


async def test_host_of_the_weight_groups_rendezvous_is_configurable(control, engines):
    publisher = BroadcastPublisher(control, host="localhost")
    assert (await publisher.publish(publication(1, engines))).failed == {}
    assert {join.rendezvous_host for join in control.joins} == {"localhost"}
    await publisher.close()
    nowhere = BroadcastPublisher(control, host="198.51.100.7")
    with pytest.raises(AddressError, match=r"the weight rendezvous cannot listen on 198.51.100.7"):
        await nowhere.publish(publication(2, engines))


async def test_publisher_leaves_its_weight_group_without_blocking_the_event_loop(publisher, engines, monkeypatch):
    assert (await publisher.publish(publication(1, engines))).failed == {}
    may_leave, close = threading.Event(), Collective.close

    def slow(collective):
        assert may_leave.wait(SOON_S)
        close(collective)

    monkeypatch.setattr(Collective, "close", slow)
    closing = asyncio.create_task(publisher.close())
    await asyncio.sleep(0.05)
    assert not closing.done()
    may_leave.set()
    await asyncio.wait_for(closing, PATIENCE_S)
