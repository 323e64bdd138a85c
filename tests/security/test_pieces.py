"""Weight pieces of a wrong length, and update requests that no broadcast follows, fail without blocking any engine."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from inference_contract.errors import EngineStopped, PeerLost, UpdateInProgress
from inference_contract.weights import UpdatePhase, UpdateStatus
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.system.background import in_background
from pipelinerl.weights.broadcast.publisher import BroadcastPublisher
from pipelinerl.weights.broadcast.sender import WeightSender
from tests.engines.weights.test_weight_receiver import LAYOUT, Setting
from tests.fakes.scripted_engine import application as engine
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S, SOON_S
from tests.weights.broadcast.test_publisher import Recording, publication

KEY = "pieces-0.1"
ARRAYS = {parameter.name: np.ones(parameter.shape, np.float32) for parameter in LAYOUT.parameters}


@pytest.fixture
async def setting():
    return Setting()


async def test_engine_rejects_weight_pieces_of_a_wrong_length_before_it_receives_the_first(setting):
    """If a piece is longer than the receiver expects, Gloo throws in its own thread, which would end the process."""
    await setting.join(1)
    await setting.prepare(bucket_bytes=64, pieces_key=KEY)
    sender, group = WeightSender(LAYOUT, lambda: iter(ARRAYS.items()), 128), setting.trainer
    deadline = time.monotonic() + PATIENCE_S
    in_background("send", lambda: sender.send(group, deadline=deadline, silence_s=PATIENCE_S, pieces_key=KEY))
    with pytest.raises(PeerLost, match="rank 0 is about to send pieces of"):
        await setting.commit()
    assert not setting.target.current.any() and not setting.target.finished


async def test_repeated_prepare_request_is_rejected_if_it_changes_the_bucket_size_or_the_pieces_key(setting):
    await setting.join(1)
    await setting.prepare(bucket_bytes=64)
    assert await setting.prepare(bucket_bytes=64, timeout_s=9.0) is UpdateStatus.PREPARED
    for other in ({"bucket_bytes": 32}, {"pieces_key": KEY}):
        with pytest.raises(UpdateInProgress):
            await setting.prepare(**{"bucket_bytes": 64, **other})


async def test_weight_update_aborted_before_its_broadcast_ends_without_waiting_for_peers(setting):
    """The engine has not entered a collective operation yet, so it need not wait for its peers to leave."""
    await setting.join(1)
    await setting.prepare(pieces_key=KEY, timeout_s=PATIENCE_S)
    began, old = time.monotonic(), setting.trainer
    await setting.abort()
    setting.trainer = None
    await setting.join(2)
    await setting.prepare(version=2, generation=2, timeout_s=PATIENCE_S)
    assert time.monotonic() - began < SOON_S and old is not None


class _Deaf(Recording):
    """A client of engines that never delivers prepare requests to the engines in `lost`."""

    lost: frozenset[str] = frozenset()

    async def request_weight_update(self, url, request):
        if url in self.lost and request.phase is UpdatePhase.PREPARE:
            await asyncio.sleep(0.1)
            raise EngineStopped("the request was lost")
        return await super().request_weight_update(url, request)


async def test_engine_that_did_not_receive_the_prepare_request_does_not_delay_the_weight_update_of_others():
    """If the broadcast included that engine, other engines in gloo's tree would wait for it until a timeout."""
    with in_thread(engine()) as first, in_thread(engine()) as second, in_thread(engine()) as third:
        urls = [first, second, third]
        async with EngineClient() as client:
            control = _Deaf(client)
            publisher = BroadcastPublisher(control, bucket_bytes=128)
            try:
                await publisher.publish(publication(1, urls, timeout_s=PATIENCE_S))
                for version, lost in ((2, first), (3, second), (4, third)):
                    control.lost = frozenset({lost})
                    began = time.monotonic()
                    report = await publisher.publish(publication(version, urls, timeout_s=PATIENCE_S))
                    assert set(report.failed) == {lost} and time.monotonic() - began < SOON_S
            finally:
                await publisher.close()
