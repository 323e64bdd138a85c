"""Epochs, group generations and weight versions only increase; a wrong number never locks the trainer out for good."""

import asyncio

import httpx
import pytest

from inference_contract.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    StaleGeneration,
    StaleVersion,
    from_wire,
)
from inference_contract.weights import (
    MOST_EPOCH,
    MOST_EPOCH_STEP,
    MOST_GENERATION,
    MOST_GENERATION_STEP,
    MOST_VERSION,
    MOST_VERSION_STEP,
    UpdateStatus,
)
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.plugins.parameter_server.version_table import VersionTable
from pipelinerl.weights.broadcast.publisher import BroadcastPublisher
from tests.engines.weights.test_weight_receiver import LAYOUT, Setting
from tests.fakes.parameter_server import TOKEN, application as parameter_server
from tests.fakes.scripted_engine import application as engine
from tests.fakes.served import in_thread
from tests.weights.broadcast.test_publisher import publication


@pytest.fixture
async def setting():
    return Setting()


async def test_failed_join_of_another_weight_group_leaves_the_current_group_usable(setting):
    await setting.join(1)
    with pytest.raises(DeadlineExceeded):
        await setting.receiver.init_process_group(setting.joining(1000, timeout_s=0.3))
    await setting.prepare()
    await setting.send()
    assert await setting.commit() is UpdateStatus.COMMITTED
    old, setting.trainer = setting.trainer, None
    await setting.join(2)  # generation 2 is accepted, although the failed join had generation 1000
    assert old is not None


async def test_trainer_forms_a_weight_group_with_an_engine_on_which_a_forged_join_is_still_pending(setting):
    forged = asyncio.create_task(setting.receiver.init_process_group(setting.joining(1000, timeout_s=2.0)))
    await asyncio.sleep(0.05)
    await setting.join(1)
    await setting.prepare()
    await setting.send()
    assert await setting.commit() is UpdateStatus.COMMITTED
    with pytest.raises(DeadlineExceeded):
        await forged


async def test_engine_limits_the_number_of_weight_group_joins_in_progress(setting):
    """The limit exists because each join in progress occupies a thread."""
    joins = [setting.receiver.init_process_group(setting.joining(1 + i, timeout_s=2.0)) for i in range(20)]
    ended = await asyncio.gather(*joins, return_exceptions=True)
    assert [type(error) for error in ended].count(Overloaded) == 4


async def test_engine_rejects_a_group_generation_epoch_or_weight_version_far_above_its_current_one(setting):
    with pytest.raises(InvalidRequest, match="generation must be at most"):
        await setting.receiver.init_process_group(setting.joining(MOST_GENERATION_STEP + 1, timeout_s=0.3))
    await setting.join(1)
    for far in ({"epoch": MOST_EPOCH_STEP + 1}, {"version": MOST_VERSION_STEP + 1}):
        with pytest.raises(InvalidRequest, match="at most"):
            await setting.prepare(**far)
    await setting.prepare()  # accepted, so the rejected requests have changed nothing


def test_parameter_server_rejects_a_lower_or_far_higher_epoch_and_advises_a_restart():
    table = VersionTable(room=2)
    table.confirm(MOST_EPOCH_STEP, {})
    with pytest.raises(InvalidRequest, match="restart this server"):
        table.confirm(3 * MOST_EPOCH_STEP, {})
    with pytest.raises(StaleVersion, match="this server received a wrong epoch: restart it"):
        table.confirm(1, {})


@pytest.mark.parametrize(
    ("server", "path", "body"),
    [
        (engine, "/init_process_group", {"generation": MOST_GENERATION}),
        (engine, "/request_weight_update", {"epoch": MOST_EPOCH}),
        (engine, "/request_weight_update", {"version": MOST_VERSION}),
        (parameter_server, "/versions", {"epoch": MOST_EPOCH}),
        (parameter_server, "/versions", {"epoch": 10**30}),
        (parameter_server, "/versions", {"version": MOST_VERSION}),
        (parameter_server, "/progress", {"epoch": 10**30}),
    ],
)
async def test_servers_reject_epochs_group_generations_and_weight_versions_above_a_fixed_limit(server, path, body):
    layout = LAYOUT.model_dump(mode="json")
    group = {"group": "g", "backend": "gloo", "rendezvous_host": "127.0.0.1", "rendezvous_port": 9, "rank": 1}
    whole = {
        "/init_process_group": group | {"world_size": 2, "generation": 1, "timeout_s": 0.1},
        "/request_weight_update": {"phase": "abort", "epoch": 1, "version": 1},
        "/versions": {"epoch": 1, "version": 1, "layout": layout},
        "/progress": {"epoch": 1, "progress": {}},
    }
    transport = httpx.ASGITransport(server())
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as http:
        answer = await http.post(path, json=whole[path] | body)
    assert answer.status_code in (400, 422), answer.text
    assert next(iter(body)) in answer.text and "less than" in answer.text, answer.text


async def test_trainer_forms_a_weight_group_with_a_generation_above_the_huge_one_of_another_client(setting):
    """Another client with the token joins the engine to a group of its own; the trainer's next publication succeeds."""
    with in_thread(engine()) as url:
        async with EngineClient() as client:
            publisher = BroadcastPublisher(client, bucket_bytes=128)
            try:
                generation = 2**50
                setting.trainer = await setting.met(
                    generation, client.init_process_group(url, setting.joining(generation))
                )
                report = await publisher.publish(publication(1, [url]))
                assert report.failed == {} and (await client.health(url)).model_version == 1
            finally:
                await publisher.close()


def test_error_response_for_a_stale_group_generation_contains_the_engines_generation_and_epoch():
    error = StaleGeneration("no", known={"generation": 7, "epoch": 2})
    assert from_wire(409, error.to_wire()).known == {"generation": 7, "epoch": 2}
    for known in (None, [], "x", {"generation": "7", "epoch": None}):
        assert from_wire(409, {"error": {"code": "stale_generation", "message": "no", "known": known}}).known == {}
