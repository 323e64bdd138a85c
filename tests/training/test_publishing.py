"""Engines load the weight versions that are announced in a stream; engines that stay silent are skipped."""

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from inference_contract.errors import DigestMismatch, LayoutMismatch
from inference_contract.weights import (
    OnUpdate,
    Transport,
    UpdatePhase,
    UpdateStatus,
    WeightUpdateRequest,
    WeightUpdateResponse,
)
from pipelinerl.engines.weights.announced_updates import follow_announcements
from pipelinerl.errors import EngineUnreachable
from pipelinerl.messages import ANNOUNCEMENTS, TAKEN, WeightsTaken, encode
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.training.publishing import StreamAnnouncer
from pipelinerl.weights.grace import Grace
from tests.patience import PATIENCE_S, SOON_S

A, B, C = "http://a:1", "http://b:1", "http://c:1"


class Taking:
    """A fake of an engine's weight-update interface that records requests and may reject them."""

    def __init__(self, refusal=None):
        self.refusal = refusal
        self.requests = []
        self.serves = 0
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def request_weight_update(self, request):
        self.requests.append(request)
        await self.may_go_on.wait()
        if self.refusal is not None:
            raise self.refusal
        if request.version == self.serves:
            status = UpdateStatus.ALREADY_SERVING
        elif request.phase is UpdatePhase.PREPARE:
            status = UpdateStatus.PREPARED
        else:
            self.serves, status = request.version, UpdateStatus.COMMITTED
        return WeightUpdateResponse(status=status, version=self.serves, epoch=1, pause_s=0.25)


@asynccontextmanager
async def following(stream, **engines):
    """Let the engines `http://NAME:1` read announcements from the stream; wait until each has reported that it does."""
    tasks = [
        asyncio.create_task(follow_announcements(engine, stream, url=f"http://{name}:1"))
        for name, engine in engines.items()
    ]
    async with asyncio.timeout(PATIENCE_S):
        while await stream.length(TAKEN) < len(engines):
            await asyncio.sleep(0)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def prepare(version, **fields):
    known = {"sources": ("http://s0:1", "http://s1:1"), "layout_id": "l", "digest": "d", "timeout_s": 7.0}
    return WeightUpdateRequest(
        phase=UpdatePhase.PREPARE, version=version, epoch=1, transport=Transport.PULL, **(known | fields)
    )


async def tell(announcer, version, *engines, left_out=()):
    deadline = time.monotonic() + PATIENCE_S
    return dict(await announcer.tell(prepare(version), engines, left_out=left_out, deadline=deadline))


async def test_engines_that_read_the_announcement_stream_load_each_version_and_report_it():
    stream, a, b = MemoryStream(), Taking(), Taking()
    announcer = StreamAnnouncer(stream, quiet_s=PATIENCE_S)
    async with following(stream, a=a, b=b):
        for version in (1, 2):
            answers = await tell(announcer, version, A, B, C)
            assert answers == {
                url: WeightUpdateResponse(status=UpdateStatus.COMMITTED, version=version, epoch=1, pause_s=0.25)
                for url in (A, B)
            }, "who does not follow is neither waited for nor spoken for"
    assert (a.serves, b.serves) == (2, 2)
    prepare, commit = a.requests[2:]
    assert set(prepare.sources or ()) == {"http://s0:1", "http://s1:1"} and prepare.layout_id == "l"
    assert (commit.phase, commit.digest, commit.timeout_s) == (UpdatePhase.COMMIT, "d", 7.0)
    assert commit.on_update is OnUpdate.CONTINUE
    assert await stream.length(ANNOUNCEMENTS) == 1, "what is over is trimmed"


async def test_engines_pull_announced_weights_from_different_replicas():
    stream, engines = MemoryStream(), {f"e{number}": Taking() for number in range(16)}
    async with following(stream, **engines):
        await tell(StreamAnnouncer(stream, quiet_s=PATIENCE_S), 1, *(f"http://{name}:1" for name in engines))
    assert {(engine.requests[0].sources or ("",))[0] for engine in engines.values()} == {"http://s0:1", "http://s1:1"}


async def test_engine_that_already_serves_the_announced_version_gets_no_commit_request():
    stream, a = MemoryStream(), Taking()
    a.serves = 1
    async with following(stream, a=a):
        (answer,) = (await tell(StreamAnnouncer(stream, quiet_s=PATIENCE_S), 1, A)).values()
    assert isinstance(answer, WeightUpdateResponse) and answer.status is UpdateStatus.ALREADY_SERVING
    assert [request.phase for request in a.requests] == [UpdatePhase.PREPARE]


@pytest.mark.parametrize("refusal", [LayoutMismatch("another model", param="layout"), DigestMismatch("other bytes")])
async def test_trainer_gets_the_exception_class_and_text_with_which_an_engine_rejected_weights(refusal):
    stream, a, b = MemoryStream(), Taking(refusal), Taking()
    async with following(stream, a=a, b=b):
        answers = await tell(StreamAnnouncer(stream, quiet_s=PATIENCE_S), 1, A, B)
    assert type(answers[A]) is type(refusal) and str(answers[A]) == str(refusal)
    assert isinstance(answers[B], WeightUpdateResponse)


async def test_engine_excluded_from_an_announcement_keeps_its_weights():
    stream, a, b = MemoryStream(), Taking(), Taking()
    announcer = StreamAnnouncer(stream, quiet_s=PATIENCE_S)
    async with following(stream, a=a, b=b):
        assert set(await tell(announcer, 1, A, left_out=(B,))) == {A}
        assert set(await tell(announcer, 2, A, B)) == {A, B}
    assert [request.version for request in b.requests] == [2, 2]


async def test_trainer_skips_a_silent_engine_and_includes_it_again_once_it_reports():
    stream, a, b = MemoryStream(), Taking(), Taking()
    announcer = StreamAnnouncer(stream, quiet_s=0.05)
    async with following(stream, a=a, b=b):
        b.may_go_on.clear()
        assert await tell(announcer, 1, B) == {}
        b.may_go_on.set()
        async with asyncio.timeout(PATIENCE_S):
            while b.serves != 1:
                await asyncio.sleep(0)
        announcer = StreamAnnouncer(stream, quiet_s=PATIENCE_S)
        assert set(await tell(announcer, 2, A, B)) == {A, B}


async def test_silent_engine_with_history_is_late_after_its_grace_and_gets_no_second_wait():
    stream, a, b, grace = MemoryStream(), Taking(), Taking(), Grace()
    announcer = StreamAnnouncer(stream, grace=grace, quiet_s=PATIENCE_S)
    async with following(stream, a=a, b=b):
        engines = (A, B, *(f"http://gone-{number}:1" for number in range(6)))
        assert set(await tell(announcer, 1, *engines)) == {A, B}
        b.may_go_on.clear()
        began = time.monotonic()
        answers = await tell(announcer, 2, *engines)
        assert 0.4 < time.monotonic() - began < SOON_S
        assert isinstance(answers[A], WeightUpdateResponse)
        assert isinstance(answers[B], EngineUnreachable) and "did not answer an update" in str(answers[B])
        assert set(await tell(announcer, 3, *engines)) == {A}, "it is asked by a request next time"
        b.may_go_on.set()


async def test_engine_loads_only_the_newest_of_several_announced_versions():
    stream, a = MemoryStream(), Taking()
    announcer = StreamAnnouncer(stream, quiet_s=0.0)
    async with following(stream, a=a):
        a.may_go_on.clear()
        for version in (1, 2, 3):
            assert await tell(announcer, version, A) == {}
            await stream.append(TAKEN, [encode(WeightsTaken(url=A))])
            async with asyncio.timeout(PATIENCE_S):
                while not a.requests:
                    await asyncio.sleep(0)
        a.may_go_on.set()
        async with asyncio.timeout(PATIENCE_S):
            while a.serves != 3:
                await asyncio.sleep(0)
    assert [request.version for request in a.requests] == [1, 1, 3, 3]


async def test_trainer_and_engines_skip_unreadable_entries_in_the_announcement_streams():
    stream, a = MemoryStream(), Taking()
    async with following(stream, a=a):
        for name in (ANNOUNCEMENTS, TAKEN):
            await stream.append(name, [b"\xff", b""])
        assert set(await tell(StreamAnnouncer(stream, quiet_s=PATIENCE_S), 1, A)) == {A}


async def test_undecodable_report_of_an_engine_about_a_loaded_version_counts_as_a_failure():
    stream = MemoryStream()
    announcer = StreamAnnouncer(stream, quiet_s=PATIENCE_S)
    await stream.append(TAKEN, [encode(WeightsTaken(url=A))])
    telling = asyncio.create_task(tell(announcer, 1, A))
    async with asyncio.timeout(PATIENCE_S):
        while not await stream.length(ANNOUNCEMENTS):
            await asyncio.sleep(0)
    await stream.append(TAKEN, [encode(WeightsTaken(url=A, epoch=1, version=1, answer=b"{}"))])
    assert isinstance((await telling)[A], Exception)
