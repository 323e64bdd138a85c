"""A weight version is divided into shards, each on a parameter server and its replicas, over HTTP and shared memory."""

import time
from contextlib import ExitStack, closing
from dataclasses import replace

import httpx
import numpy as np
import pytest

from inference_contract.errors import DigestMismatch
from inference_contract.weights import DType, ParameterSpec, WeightLayout
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.errors import UpdateError
from pipelinerl.plugins.parameter_server.download import WeightPuller
from pipelinerl.plugins.parameter_server.publisher import PullPublisher
from pipelinerl.plugins.parameter_server.upload import Uploader
from tests.fakes import parameter_server, scripted_engine
from tests.fakes.parameter_server import (
    LAYOUT,
    TOKEN,
    application,
    digest,
    flat,
    publication,
    sharded,
    soon,
    state,
    wait_until_saved,
)
from tests.fakes.served import as_process, in_thread
from tests.patience import PATIENCE_S, SOON_S

#: A layout of many parameters of odd sizes, one of which has a third of all bytes.
MANY = WeightLayout(
    parameters=tuple(
        ParameterSpec(name=f"p{row}", shape=(3001 if row == 7 else 31 + row % 13, 257), dtype=DType.FLOAT32)
        for row in range(160)
    )
)
#: A layout in which every shard is larger than socket and pipe buffers.
LARGE = WeightLayout(
    parameters=tuple(ParameterSpec(name=f"p{row}", shape=(2**20,), dtype=DType.FLOAT32) for row in range(12))
)
GONE = "http://127.0.0.1:9"


@pytest.fixture
def servers():
    with ExitStack() as stack:
        yield [stack.enter_context(in_thread(application())) for _ in range(4)]


def place(urls, shards, version=1, *, by_memory=True, **fields):
    with closing(Uploader(urls, shards=shards, token=TOKEN, shared_memory=by_memory)) as placement:
        return placement.upload(publication(version, **fields), {}, deadline=soon())


def pulled(placed, version, layout, *, by_memory=True):
    pull = sharded(version, placed.sources, bucket_bytes=placed.bucket_bytes, layout=layout, timeout_s=PATIENCE_S)
    assert pull.digest == placed.digest
    return parameter_server.pulled(pull, layout, by_memory=by_memory)


@pytest.mark.parametrize("layout", [LAYOUT, MANY], ids=["three", "many"])
@pytest.mark.parametrize("shards", [2, 4])
def test_shards_of_weights_form_the_whole_version_over_http_and_shared_memory(servers, layout, shards):
    memory, http = (
        Uploader(servers, shards=shards, token=TOKEN, shared_memory=by_memory) for by_memory in (True, False)
    )
    for version in range(1, 7):  # several versions, so that servers reuse memory
        placement = memory if version % 2 else http
        placed = placement.upload(publication(version, layout=layout), {}, deadline=soon())
        assert [url for urls in placed.sources for url in urls] == servers
        assert [len(urls) for urls in placed.sources] == [len(servers) // shards] * shards
        assert placed.digest == digest(version, layout) and placed.failed == {}
        into = pulled(placed, version, layout, by_memory=version % 3 == 0)
        assert np.array_equal(into, flat(version, layout))
        placement.confirm(1, {}, deadline=soon())
    held = [state(url)["versions"][-1] for url in servers]
    assert {record["whole"] for record in held} == {digest(6, layout)}
    assert len({record["digest"] for record in held}) == shards
    memory.close()
    http.close()


def test_parameter_server_serves_only_its_own_shard(servers):
    placed = place(servers[:2], 2, layout=MANY)
    for number, ranges in enumerate(MANY.shards(2, placed.bucket_bytes)):
        for start, end in ranges[:3]:
            for url, status in ((servers[number], 206), (servers[1 - number], 400)):
                headers = {"authorization": f"Bearer {TOKEN}", "range": f"bytes={start}-{end - 1}"}
                answer = httpx.get(url + "/weights/1/1", headers=headers, trust_env=False)
                assert answer.status_code == status
                if status == 206:
                    assert answer.content == flat(1, MANY)[start:end].tobytes()
                else:
                    assert f"which holds shard {1 - number} of 2" in answer.json()["error"]["message"]
        whole = httpx.get(servers[number] + "/weights/1/1", headers={"authorization": f"Bearer {TOKEN}"})
        assert whole.status_code == 400, "a server of one shard must not serve the whole version"


def test_only_shards_that_no_parameter_server_has_are_uploaded():
    gathered = []

    def counted():
        gathered.append(1)
        yield from publication(1, layout=MANY).weights()

    once = {"layout": MANY, "weights": counted}
    with ExitStack() as stack:
        first, second = (stack.enter_context(in_thread(application())) for _ in range(2))
        place([first, second], 2, **once)
        assert place([first, second], 2, **once).digest == digest(1, MANY) and len(gathered) == 1
        fresh = stack.enter_context(in_thread(application()))
        placed = place([first, fresh], 2, **once)
        assert len(gathered) == 2 and np.array_equal(pulled(placed, 1, MANY), flat(1, MANY))
        with pytest.raises(UpdateError, match="uploaded before with other bytes"):
            empty = stack.enter_context(in_thread(application()))
            place([first, empty], 2, layout=MANY, weights=parameter_server.weights(2, MANY))


def test_upload_names_the_missing_server_of_a_shard_and_no_server_serves_the_version(servers):
    began = time.monotonic()
    with (
        closing(Uploader([servers[0], GONE], shards=2, token=TOKEN)) as placement,
        pytest.raises(UpdateError, match=rf"no parameter server takes shard 1 of 2 of the version: {GONE}: .*refused"),
    ):
        placement.upload(publication(1), {}, deadline=began + 0.5)
    assert time.monotonic() - began < SOON_S
    assert [version["digest"] for version in state(servers[0])["versions"]] == [None], (
        "no shard of the version may be served"
    )


def test_shard_of_a_version_is_kept_until_all_other_shards_have_a_newer_version(servers):
    """The server of shard 0 must keep version 1 as long as the server of shard 1 has only version 1."""
    placed = place(servers[:2], 2, layout=MANY)
    assert placed.failed == {}
    with closing(Uploader(servers[:2], shards=2, token=TOKEN)) as placement:
        placement.upload(publication(1, layout=MANY), {}, deadline=soon())
        with closing(Uploader([servers[0], GONE], shards=2, token=TOKEN)) as half:
            half._replicas = {servers[0]: (1, 1), GONE: (1, 1)}
            with pytest.raises(UpdateError):
                half.upload(publication(2, layout=MANY), {}, deadline=time.monotonic() + 0.3)
        assert np.array_equal(pulled(placed, 1, MANY), flat(1, MANY))
        placement.upload(publication(3, layout=MANY), {}, deadline=soon())
        placement.confirm(1, {}, deadline=soon())
        for url in servers[:2]:
            assert [version["version"] for version in state(url)["versions"] if version["digest"]] == [3]


@pytest.mark.parametrize("by_memory", [True, False], ids=["memory", "http"])
def test_pull_of_a_shard_from_a_killed_server_continues_from_the_servers_replica(by_memory):
    with ExitStack() as stack:
        victim, process = stack.enter_context(as_process("tests.fakes.parameter_server"))
        others = [stack.enter_context(in_thread(application())) for _ in range(3)]
        placed = place([victim, *others], 2, layout=LARGE, by_memory=by_memory)
        into, came = np.zeros(LARGE.num_bytes, np.uint8), []

        def kill_at_the_first(num_bytes):
            came.append(num_bytes)
            if len(came) == 1:
                process.kill()
                process.wait(PATIENCE_S)

        puller = WeightPuller(token=TOKEN, shared_memory=by_memory)
        pull = sharded(1, placed.sources, bucket_bytes=placed.bucket_bytes, layout=LARGE, timeout_s=PATIENCE_S)
        assert puller.fetch(pull, into=into, on_progress=kill_at_the_first) == digest(1, LARGE)
        assert np.array_equal(into, flat(1, LARGE)) and came == sorted(set(came))


def test_pull_of_a_shard_from_a_killed_server_fails_without_waiting_and_names_the_server():
    with ExitStack() as stack:
        (victim, process) = stack.enter_context(as_process("tests.fakes.parameter_server"))
        other = stack.enter_context(in_thread(application()))
        placed = place([other, victim], 2, layout=LARGE)
        began = time.monotonic()
        with pytest.raises(UpdateError, match=rf"no source gave version 1\.1, shard 1 of 2: {victim}: "):
            WeightPuller(token=TOKEN, shared_memory=False).fetch(
                sharded(1, placed.sources, bucket_bytes=placed.bucket_bytes, layout=LARGE, timeout_s=PATIENCE_S),
                into=np.zeros(LARGE.num_bytes, np.uint8),
                on_progress=lambda _: process.kill(),
            )
        assert time.monotonic() - began < SOON_S, "the pull must fail as soon as the server dies, not at the deadline"


def test_shard_with_wrong_bytes_is_fetched_from_the_next_server_or_rejected_if_there_is_none(servers):
    """The shards come from two publications of one version number, which only the whole version's digest reveals."""
    place([servers[0], servers[1]], 2, layout=MANY)
    placed = place([servers[2], servers[3]], 2, layout=MANY, weights=parameter_server.weights(2, MANY))
    into = np.zeros(MANY.num_bytes, np.uint8)
    puller = WeightPuller(token=TOKEN)
    mixed = sharded(1, ((servers[0],), (servers[3],)), bucket_bytes=placed.bucket_bytes, layout=MANY)
    with pytest.raises(DigestMismatch):
        puller.fetch(mixed, into=into)
    healed = replace(mixed, shards=(mixed.shards[0], replace(mixed.shards[1], sources=(servers[3], servers[1]))))
    puller.fetch(healed, into=into)
    assert np.array_equal(into, flat(1, MANY))


def test_restarted_parameter_servers_serve_the_shards_that_they_saved(tmp_path):
    with ExitStack() as stack:
        urls = [stack.enter_context(in_thread(application(str(tmp_path / f"{n}")))) for n in range(2)]
        place(urls, 2, layout=MANY)
        for url in urls:
            wait_until_saved(url, (1, 1))
    saved = sum((tmp_path / f"{n}" / "1.1" / "weights.bin").stat().st_size for n in range(2))
    assert saved == MANY.num_bytes, "each byte must be saved once"
    with ExitStack() as stack:
        urls = [stack.enter_context(in_thread(application(str(tmp_path / f"{n}")))) for n in range(2)]
        unwilling = None  # reading the weights again would fail
        placed = place(urls, 2, layout=MANY, weights=unwilling)
        assert placed.digest == digest(1, MANY) and np.array_equal(pulled(placed, 1, MANY), flat(1, MANY))


def test_number_of_shards_that_differs_from_an_earlier_upload_is_rejected(servers):
    place(servers[:2], 2, layout=MANY)
    with pytest.raises(UpdateError, match=r"was announced as shard 0 of 2 .*, now as shard 0 of 4"):
        place(servers, 4, layout=MANY)
    with pytest.raises(ValueError, match="as many parameter servers for each of 3 shards, got 4"):
        Uploader(servers, shards=3, token=TOKEN)


async def test_engines_pull_all_shards_and_are_spread_over_the_replicas_of_each_shard(servers):
    with ExitStack() as stack:
        engines = [stack.enter_context(in_thread(scripted_engine.application(token=TOKEN))) for _ in range(2)]
        async with EngineClient(token=TOKEN) as client:
            publisher = PullPublisher(client, Uploader(servers, shards=2, token=TOKEN))
            stack.callback(publisher._placement.close)
            layout = scripted_engine.LAYOUT
            for version, targets in ((1, engines[:1]), (1, engines), (2, engines)):
                report = await publisher.publish(
                    publication(version, tuple(targets), layout=layout, timeout_s=PATIENCE_S)
                )
                assert report.failed == {} and set(report.pauses_s) == set(targets)
                assert report.digest == digest(version, layout)
            assert [(await client.models(url)).data[0].digest for url in engines] == [digest(2, layout)] * 2
            members = {url: [1, 2] for url in [*engines, *servers]}
            assert [state(url)["progress"] for url in servers] == [members] * 4
