"""Weights are published to real engines through real parameter servers; some engines reject them or are unreachable."""

import asyncio
from contextlib import ExitStack

import pytest

from inference_contract.errors import NotPrepared, PeerLost
from inference_contract.schemas import ChatCompletionRequest
from inference_contract.weights import UpdatePhase, UpdateStatus, WeightUpdateResponse
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.errors import FencedError, NotUploaded, UpdateError
from pipelinerl.plugins.parameter_server.publisher import PullPublisher
from pipelinerl.plugins.parameter_server.upload import Uploaded, Uploader
from pipelinerl.system.machine import free_ports
from pipelinerl.weights.broadcast.publisher import BroadcastPublisher
from pipelinerl.weights.publisher import PublishReport
from tests.fakes import parameter_server, scripted_engine
from tests.fakes.parameter_server import TOKEN, state
from tests.fakes.scripted_engine import LAYOUT
from tests.fakes.served import in_thread


def publication(version, engines, **fields):
    return parameter_server.publication(version, tuple(engines), **{"layout": LAYOUT, **fields})


class Announcing:
    """A fake `Announcer` that records announcements, and returns the given answers of engines."""

    def __init__(self, answers):
        self.answers = answers
        self.announced = []

    async def tell(self, prepare, engines, *, left_out, deadline):
        self.announced.append((prepare, list(engines), list(left_out)))
        return {url: self.answers[url] for url in engines if url in self.answers}


class Recording:
    """A client of engines that records the weight-update requests."""

    def __init__(self, client):
        self.client = client
        self.init_process_group = client.init_process_group
        self.updates = []

    async def request_weight_update(self, url, request):
        self.updates.append((url, request))
        return await self.client.request_weight_update(url, request)


@pytest.fixture
def servers():
    with ExitStack() as stack:
        yield [stack.enter_context(in_thread(parameter_server.application())) for _ in range(2)]


@pytest.fixture
def engines():
    with ExitStack() as stack:
        yield [stack.enter_context(in_thread(scripted_engine.application(token=TOKEN))) for _ in range(2)]


@pytest.fixture
async def control():
    async with EngineClient(token=TOKEN) as client:
        yield Recording(client)


@pytest.fixture
async def publisher(control, servers):
    made = PullPublisher(control, Uploader(servers, token=TOKEN))
    yield made
    await made.close()


async def greedy(control, url):
    request = ChatCompletionRequest(
        prompt_token_ids=[3, 5], max_tokens=12, temperature=0.0, return_token_ids=True, seed=0
    )
    return (await control.client.chat(url, request)).choices[0].token_ids or []


async def serving(control, *urls):
    healths = [await control.client.health(url) for url in urls]
    return [(health.epoch, health.model_version) for health in healths]


async def test_engines_that_pull_weights_sample_the_same_tokens_as_after_a_broadcast(
    publisher, control, engines, servers
):
    report = await publisher.publish(publication(1, engines))
    assert report.failed == {} and set(report.pauses_s) == set(engines)
    assert await serving(control, *engines) == [(1, 1), (1, 1)]
    assert report.digest == parameter_server.digest(1, LAYOUT)
    assert (await control.client.models(engines[0])).data[0].digest == report.digest
    pulled = [await greedy(control, url) for url in engines]
    broadcast = BroadcastPublisher(control)
    await broadcast.publish(publication(2, engines, weights=parameter_server.weights(1, LAYOUT)))
    assert [await greedy(control, url) for url in engines] == pulled
    await broadcast.close()


async def test_engines_are_spread_over_parameter_server_replicas_and_get_the_layout_only_once(
    publisher, control, engines, servers
):
    for version in (1, 2):
        await publisher.publish(publication(version, engines))
    prepares = [(url, request) for url, request in control.updates if request.phase == "prepare"]
    firsts = {url: request.sources for url, request in prepares}
    assert firsts == {engines[0]: tuple(servers), engines[1]: tuple(reversed(servers))}
    assert [request.layout is not None for _, request in prepares] == [True, True, False, False]


async def test_engine_that_joins_late_pulls_the_version_without_a_new_upload(publisher, control, engines):
    await publisher.publish(publication(1, engines[:1]))

    def unwilling():
        raise AssertionError("the version is on the servers: it must not be gathered again")

    report = await publisher.publish(publication(1, engines, membership=2, weights=unwilling))
    assert report.failed == {} and await serving(control, *engines) == [(1, 1), (1, 1)]
    assert await greedy(control, engines[0]) == await greedy(control, engines[1])


async def test_unreachable_engine_does_not_affect_publication_to_other_engines(publisher, control, engines, servers):
    gone = "http://127.0.0.1:9"
    report = await publisher.publish(publication(1, [gone, *engines]))
    assert set(report.pauses_s) == set(engines) and "is the engine running?" in report.failed[gone]
    assert set(state(servers[0])["progress"]) == {*engines, *servers}, "versions must not be kept for the lost engine"
    with pytest.raises(UpdateError, match=r"reached no engine: http://127\.0\.0\.1:9 "):
        await publisher.publish(publication(2, [gone]))


async def test_updated_engines_are_reported_as_updated_even_if_a_repeated_upload_for_other_engines_fails():
    """One of two engines loses its parameter server during the update, and the server does not return in time."""

    class Vanishing:
        """A fake client of two engines; engine `b` loses its parameter server during the commit request."""

        async def request_weight_update(self, url, request):
            if request.phase is UpdatePhase.COMMIT and url == "http://b":
                raise PeerLost("its server was lost")
            status = UpdateStatus.COMMITTED if request.phase is UpdatePhase.COMMIT else UpdateStatus.PREPARED
            return WeightUpdateResponse(status=status, version=1, epoch=1)

    class Once:
        """A fake uploader whose first upload succeeds, and whose later uploads fail."""

        placed = 0

        def upload(self, *args, **options):
            self.placed += 1
            if self.placed > 1:
                raise UpdateError("no parameter server takes the version")
            return Uploaded((("http://server",),), 16, "digest", {})

        def confirm(self, *args, **options):
            return {}

    made = PullPublisher(Vanishing(), Once())
    report = await made.publish(publication(1, ["http://a", "http://b"]))
    assert list(report.pauses_s) == ["http://a"]
    assert report.failed == {"http://b": "no parameter server takes the version"}
    assert report.blameless == {"http://b"}


async def test_lost_parameter_servers_are_named_and_no_engine_is_blamed(control, engines, caplog):
    (port,) = free_ports(1)
    made = PullPublisher(control, Uploader([f"http://127.0.0.1:{port}"], token=TOKEN))
    sent = publication(1, engines, timeout_s=0.3)
    with pytest.raises(NotUploaded, match=f"no parameter server takes the version: .*127.0.0.1:{port}") as raised:
        await made.publish(sent)
    report = PublishReport.failure(sent, raised.value)
    assert report.failed == {} and f"127.0.0.1:{port}" in report.error
    assert "waits for a parameter server" in caplog.text
    await made.close()


async def test_publication_to_no_engines_is_uploaded_to_the_parameter_servers(publisher, engines):
    alone = await publisher.publish(publication(1, []))
    assert alone.pauses_s == {} == alone.failed
    assert alone.digest == (await publisher.publish(publication(1, engines))).digest


async def test_trainer_of_an_earlier_epoch_cannot_publish_through_parameter_servers(
    publisher, control, engines, servers
):
    await publisher.publish(publication(7, engines))
    second = PullPublisher(control, Uploader(servers, token=TOKEN))
    await second.publish(publication(5, engines, epoch=2))
    assert await serving(control, *engines) == [(2, 5), (2, 5)]
    with pytest.raises(FencedError, match="epoch 2 has taken over from epoch 1"):
        await publisher.publish(publication(8, engines))
    assert await serving(control, *engines) == [(2, 5), (2, 5)]
    await second.close()


async def test_concurrent_publications_of_weight_versions_complete_in_order(publisher, control, engines):
    reports = await asyncio.gather(*(publisher.publish(publication(version, engines)) for version in (1, 2, 3, 4)))
    assert [report.version for report in reports] == [1, 2, 3, 4]
    assert await serving(control, *engines) == [(1, 4), (1, 4)]


async def test_engines_that_follow_announcements_get_an_update_request_only_if_they_lack_the_layout(
    control, servers, engines
):
    follows, without_layout = engines
    served = WeightUpdateResponse(status=UpdateStatus.COMMITTED, version=1, epoch=1, pause_s=0.5)
    other = "http://127.0.0.1:1"  # no engine listens at this address, so a request to it would fail
    announcer = Announcing({follows: served, other: served, without_layout: NotPrepared("which?", param="layout_id")})
    publisher = PullPublisher(control, Uploader(servers, token=TOKEN), announcer=announcer)
    try:
        report = await publisher.publish(publication(1, [*engines, other]))
        assert (report.failed, report.pauses_s[follows], set(report.pauses_s)) == ({}, 0.5, {*engines, other})
        assert {url for url, _ in control.updates} == {without_layout}
        assert (await publisher.publish(publication(2, [without_layout]))).failed == {}
        assert len(announcer.announced) == 1, "an announcement must not reach more engines than it is for"
        await publisher.publish(publication(3, engines))
    finally:
        await publisher.close()
    (prepare, announced, left_out), (_, _, then_left_out) = announcer.announced
    assert (prepare.phase, prepare.layout_id, prepare.digest) == (UpdatePhase.PREPARE, LAYOUT.layout_id, report.digest)
    assert set(prepare.sources or ()) == set(servers) and prepare.layout is None
    assert (sorted(announced), left_out, then_left_out) == (sorted([*engines, other]), [], [other])
