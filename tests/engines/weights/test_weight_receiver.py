"""Behaviour of the weight receiver that the conformance kit cannot test: deadlines, dirty state, group membership."""

import asyncio
import threading
import time

import numpy as np
import pytest
import torch

from inference_contract.errors import (
    ContractError,
    DeadlineExceeded,
    DigestMismatch,
    Dirty,
    InvalidRequest,
    NotPrepared,
    PeerLost,
    StaleGeneration,
    StaleVersion,
    UpdateInProgress,
)
from inference_contract.weights import (
    Backend,
    DType,
    OnUpdate,
    ParameterSpec,
    Transport,
    UpdatePhase,
    UpdateStatus,
    WeightLayout,
    WeightUpdateRequest,
)
from pipelinerl.engines.weights import weight_receiver
from pipelinerl.engines.weights.weight_receiver import WeightReceiver
from pipelinerl.errors import DeadlineError, UpdateError
from pipelinerl.weights.broadcast.collective import Rendezvous
from pipelinerl.weights.layout import WeightDigest
from tests.fakes.groups import joining, rank
from tests.patience import PATIENCE_S, SOON_S

LAYOUT = WeightLayout(
    parameters=(
        ParameterSpec(name="first", shape=(16,), dtype=DType.FLOAT32),
        ParameterSpec(name="second", shape=(16,), dtype=DType.FLOAT32),
    )
)
BYTES = np.arange(LAYOUT.num_bytes, dtype=np.uint8)


def digest_of(data):
    made = WeightDigest()
    made.update(data)
    return made.hexdigest()


DIGEST = digest_of(BYTES)


class Target:
    """A `WeightTarget` of two buffers that a commit swaps; a test can make the next commit fail or wait."""

    def __init__(self):
        self.current = np.zeros(LAYOUT.num_bytes, np.uint8)
        self._staged = np.zeros(LAYOUT.num_bytes, np.uint8)
        self._serving = (0, 0)
        self.error = None
        self.may_commit = asyncio.Event()
        self.may_commit.set()
        self.on_update = None
        self.finished = []

    @property
    def layout(self):
        return LAYOUT

    def staging(self):
        return self._staged

    def finish_staging(self):
        self.finished.append(self._staged.tobytes())

    def serving(self):
        return self._serving

    async def commit(self, *, version, epoch, on_update):
        await self.may_commit.wait()
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        self.current, self._staged = self._staged, self.current
        self._serving, self.on_update = (epoch, version), on_update
        return 0.001


class Setting:
    """A weight receiver with its target, and the trainer's rank 0 of the process group."""

    def __init__(self):
        self.target = Target()
        self.receiver = WeightReceiver(self.target)
        self.rendezvous = Rendezvous("127.0.0.1")
        self.trainer = None

    def joining(self, generation, **fields):
        return joining(self.rendezvous.port, generation, **fields)

    async def join(self, generation=1):
        self.trainer = await self.met(generation, self.receiver.init_process_group(self.joining(generation)))

    async def met(self, generation, joined):
        """Join a group as rank 0, await `joined`, the join of rank 1, and return the group of rank 0."""
        own = rank(self.rendezvous, generation=generation)
        await joined
        return await asyncio.wrap_future(own)

    async def prepare(self, version=1, **fields):
        defaults = {"bucket_bytes": 64, "group": "g", "generation": 1, "layout": LAYOUT}
        return await self._phase(UpdatePhase.PREPARE, version, defaults | fields)

    async def commit(self, version=1, **fields):
        return await self._phase(UpdatePhase.COMMIT, version, {"digest": DIGEST} | fields)

    async def abort(self):
        return await self._phase(UpdatePhase.ABORT, 1, {})

    async def _phase(self, phase, version, fields):
        request = WeightUpdateRequest(phase=phase, version=version, **({"epoch": 0, "timeout_s": PATIENCE_S} | fields))
        return (await self.receiver.request_weight_update(request)).status

    async def stage(self, version=1, *, bucket_bytes=64, **fields):
        assert await self.prepare(version, bucket_bytes=bucket_bytes, **fields) is UpdateStatus.PREPARED
        await self.send(bucket_bytes=bucket_bytes)

    async def update(self, version=1, **fields):
        await self.stage(version, **fields)
        assert await self.commit(version) is UpdateStatus.COMMITTED

    def pulls(self, failure=None, **how):
        source = _Pull(failure, **how)
        self.receiver = WeightReceiver(self.target, pull=source)
        return source

    async def has_come(self, num_bytes):
        update = self.receiver._update
        assert update is not None
        async with asyncio.timeout(PATIENCE_S):
            while not update.incoming.progress.startswith(f"{num_bytes} of "):
                await asyncio.sleep(0.001)

    async def send(self, *, start=0, end=len(BYTES), bucket_bytes=64):
        """Broadcast the buckets of the weights that begin in a range of their bytes."""
        for at, to in LAYOUT.pieces(bucket_bytes):
            if start <= at < end:
                part, deadline = torch.from_numpy(BYTES[at:to].copy()), time.monotonic() + PATIENCE_S
                await asyncio.to_thread(self.trainer.broadcast, part, deadline=deadline)


@pytest.fixture
async def setting():
    return Setting()


@pytest.fixture
async def joined(setting):
    await setting.join()
    return setting


async def test_receiver_rejects_an_unsupported_backend_before_joining_the_group(setting):
    """No other rank joins, so a join would wait until its deadline."""
    began = time.monotonic()
    with pytest.raises(InvalidRequest, match=r"backend must be gloo for this engine.*got nccl") as error:
        await setting.receiver.init_process_group(setting.joining(1, backend=Backend.NCCL))
    assert error.value.param == "backend" and time.monotonic() - began < SOON_S
    await setting.join()


async def test_broadcast_may_take_longer_than_its_timeout_while_it_progresses(joined):
    """The timeout bounds the time without progress, so it can be short for models of any size."""
    await joined.prepare(timeout_s=3.0, bucket_bytes=16)
    for start in range(0, len(BYTES), 16):
        await asyncio.sleep(0.45)
        await joined.send(start=start, end=start + 16, bucket_bytes=16)
    assert await joined.commit() is UpdateStatus.COMMITTED
    began = time.monotonic()
    await joined.prepare(2, timeout_s=0.5)
    with pytest.raises((DeadlineExceeded, PeerLost)):
        await joined.commit(2)
    assert time.monotonic() - began < SOON_S, "rank 0 says nothing: the receive ends by itself"


async def test_engine_serves_the_broadcast_bytes_only_after_commit_and_reports_digest_and_totals(joined):
    await joined.stage(on_update=OnUpdate.RECOMPUTE_KV)
    assert not joined.target.current.any(), "before COMMIT the old weights serve"
    assert await joined.commit() is UpdateStatus.COMMITTED
    assert np.array_equal(joined.target.current, BYTES)
    assert joined.target.finished == [BYTES.tobytes()], "finished once, with every byte there, before the commit"
    assert joined.target.on_update is OnUpdate.RECOMPUTE_KV, "COMMIT that does not name on_update takes PREPARE's"
    totals = joined.receiver.totals
    assert (totals.updates, totals.failures, totals.last_pause_s) == (1, 0, 0.001)
    assert joined.receiver.digest == DIGEST


async def test_commit_timeout_error_says_how_many_bytes_were_received(joined):
    await joined.prepare()
    await joined.send(end=64)
    await joined.has_come(64)
    with pytest.raises(
        DeadlineExceeded, match=r"rank 0 has not sent everything within 0.1 s, received so far: 64 of 128 bytes"
    ):
        await joined.commit(timeout_s=0.1)
    await joined.send(start=64)
    assert await joined.commit() is UpdateStatus.COMMITTED, "a late commit may be requested again"


async def assert_only_a_higher_generation_serves(setting):
    with pytest.raises(NotPrepared, match="higher generation"):
        await setting.prepare(2)
    await setting.join(2)
    await setting.update(2, generation=2)


async def test_receive_from_a_silent_sender_times_out_and_names_the_missing_parameter(joined):
    await joined.prepare(timeout_s=2.0)
    await joined.send(end=64)
    with pytest.raises(DeadlineExceeded, match=r"bucket 2 of 2 \(parameter 'second'\) from rank 0"):
        await joined.commit()
    assert not joined.target.current.any() and joined.receiver.dirty is None
    await assert_only_a_higher_generation_serves(joined)


async def test_next_update_of_a_group_replaces_an_uncommitted_update_after_its_timeout(joined):
    await joined.stage(timeout_s=2.0)
    await asyncio.sleep(2.1)
    await joined.update(2)


async def test_weight_receive_that_times_out_before_commit_requires_a_new_process_group(joined):
    await joined.prepare(timeout_s=0.3)
    await asyncio.sleep(0.6)
    await assert_only_a_higher_generation_serves(joined)


async def test_weight_update_fails_immediately_when_the_trainer_dies(joined):
    await joined.prepare()
    joined.trainer.close()
    began = time.monotonic()
    with pytest.raises(PeerLost, match="the old weights still serve"):
        await joined.commit()
    assert time.monotonic() - began < SOON_S
    assert joined.receiver.totals.failures == 1


async def test_update_with_a_wrong_digest_fails_but_keeps_the_process_group(joined):
    await joined.stage()
    with pytest.raises(DigestMismatch, match="digest must be 00, received"):
        await joined.commit(digest="00")
    await joined.update()


async def test_engine_whose_weight_swap_failed_midway_is_dirty_until_weights_are_committed_again(joined):
    await joined.stage()
    joined.target.error = RuntimeError("device lost")
    with pytest.raises(Dirty, match=r"the swap to 0.1 failed midway"):
        await joined.commit()
    assert joined.receiver.dirty is not None
    await joined.update()
    assert joined.receiver.dirty is None


async def test_weight_swap_that_is_rejected_before_it_begins_does_not_mark_the_engine_as_dirty(joined):
    await joined.stage()
    joined.target.error = ContractError("not now")
    with pytest.raises(ContractError, match="not now"):
        await joined.commit()
    assert joined.receiver.dirty is None and joined.receiver.totals.failures == 1


async def test_weight_swap_that_exceeds_its_timeout_still_happens_later(joined):
    joined.target.may_commit.clear()
    await joined.stage()
    with pytest.raises(DeadlineExceeded, match=r"has not happened within 0.05 s but still will"):
        await joined.commit(timeout_s=0.05)
    with pytest.raises(UpdateInProgress):
        await joined.prepare(2)
    joined.target.may_commit.set()
    assert await joined.commit() is UpdateStatus.COMMITTED
    assert await joined.commit() is UpdateStatus.ALREADY_SERVING


async def test_concurrent_commits_of_one_update_swap_the_weights_once(joined):
    joined.target.may_commit.clear()
    await joined.stage()
    commits = [asyncio.create_task(joined.commit()) for _ in range(2)]
    await asyncio.sleep(0.05)
    joined.target.may_commit.set()
    both = await asyncio.gather(*commits)
    assert both == [UpdateStatus.COMMITTED, UpdateStatus.COMMITTED]
    assert joined.receiver.totals.updates == 1 and np.array_equal(joined.target.current, BYTES)


async def test_joining_a_new_process_group_drops_the_staged_weight_update(joined):
    await joined.prepare()
    old = joined.trainer
    await joined.join(2)
    old.close()
    await joined.update(2, generation=2)


async def test_prepare_request_fails_while_a_dropped_update_still_receives_into_the_buffer(joined):
    await joined.prepare()
    rank_0_of_the_dropped_group = joined.trainer
    await joined.join(2)
    with pytest.raises(UpdateInProgress, match=r"dropped update 0\.1 still waits"):
        await joined.prepare(2, generation=2, timeout_s=0.2)
    rank_0_of_the_dropped_group.close()


async def test_joining_a_group_without_other_ranks_times_out_and_its_generation_cannot_be_reused(setting):
    with pytest.raises(DeadlineExceeded, match="joining group 'g' generation 1"):
        await setting.receiver.init_process_group(setting.joining(1, timeout_s=0.3))
    with pytest.raises(StaleGeneration, match="generation 1 was already used"):
        await setting.receiver.init_process_group(setting.joining(1))
    await setting.join(2)


async def test_joining_a_group_of_a_higher_generation_cancels_a_join_that_still_waits(setting):
    waiting = asyncio.create_task(setting.receiver.init_process_group(setting.joining(1, timeout_s=0.5)))
    await asyncio.sleep(0.05)
    await setting.join(2)
    with pytest.raises(ContractError):
        await waiting
    await setting.update(generation=2)


async def test_joining_a_group_does_not_block_the_event_loop(setting):
    """Rank 0 joins only after the event loop has run for a while; if the loop were blocked, the join would time out."""
    waiting = asyncio.create_task(setting.receiver.init_process_group(setting.joining(1, timeout_s=SOON_S)))
    for _ in range(10):
        await asyncio.sleep(0.005)
    assert not waiting.done()
    setting.trainer = await setting.met(1, waiting)


class _Pull:
    """A `PullSource` that fills half of the buffer, and then completes it, fails, or waits to be abandoned."""

    def __init__(self, failure=None, *, waits=False, gate=None):
        self._failure = failure
        self._waits = waits
        self._gate = gate
        self.orders = []

    def fetch(self, order, *, into, on_progress):
        self.orders.append(order)
        into[: len(into) // 2] = BYTES[: len(into) // 2]
        on_progress(len(into) // 2)
        if self._waits and order.given_up.wait(order.deadline - time.monotonic()):
            raise UpdateError("it was given up")
        if self._gate is not None:
            assert self._gate.wait(PATIENCE_S)
        if self._failure is not None:
            raise self._failure
        into[:] = BYTES
        return digest_of(into)


PULL = {
    "transport": Transport.PULL,
    "sources": ("http://store:1",),
    "digest": DIGEST,
    "group": None,
    "generation": None,
}


@pytest.mark.parametrize(
    ("failure", "raised"),
    [(DeadlineError, DeadlineExceeded), (UpdateError, PeerLost), (DigestMismatch, DigestMismatch)],
)
async def test_failed_pull_keeps_the_old_weights_and_the_next_pull_succeeds(setting, failure, raised):
    setting.pulls(failure("store did not answer"))
    await setting.prepare(**PULL)
    with pytest.raises(raised, match="store did not answer"):
        await setting.commit()
    assert not setting.target.current.any() and setting.target.finished == []
    assert setting.receiver.totals.failures == 1 and setting.receiver.dirty is None
    setting.pulls()
    await setting.prepare(2, **PULL)
    assert await setting.commit(2) is UpdateStatus.COMMITTED


async def test_commit_timeout_error_of_a_pull_says_how_many_bytes_were_received(setting):
    setting.pulls(waits=True)
    await setting.prepare(**PULL)
    await setting.has_come(64)
    with pytest.raises(
        DeadlineExceeded, match=r"the parameter server has not sent everything within 0.2 s, .* 64 of 128"
    ):
        await setting.commit(timeout_s=0.2)
    assert await setting.abort() is UpdateStatus.ABORTED


@pytest.mark.parametrize("waits", [True, False], ids=["pull in progress", "pull complete"])
async def test_prepare_request_of_a_later_version_replaces_an_uncommitted_pull(setting, waits):
    """The publisher has given up the earlier version and sends no COMMIT for it; a pull has no group to replace."""
    pull = setting.pulls(waits=waits)
    await setting.prepare(**PULL)
    assert await setting.prepare(**PULL) is UpdateStatus.PREPARED
    await setting.prepare(2, timeout_s=0.3, **PULL)
    assert len(pull.orders) == 2
    with pytest.raises(NotPrepared):
        await setting.commit()
    assert await setting.commit(2) is UpdateStatus.COMMITTED


async def test_update_of_a_later_trainer_epoch_replaces_an_open_update_and_earlier_epochs_are_rejected(setting):
    """The trainer of epoch 1 was suspended before its COMMIT; the trainer of epoch 2 does not wait for that COMMIT."""
    pull = setting.pulls(waits=True)
    await setting.prepare(9, epoch=1, **PULL)
    await setting.prepare(4, epoch=2, timeout_s=0.3, **PULL)
    assert pull.orders[0].given_up.is_set()
    with pytest.raises(NotPrepared):
        await setting.commit(9, epoch=1)
    with pytest.raises(StaleVersion, match="epoch 2 has taken over"):
        await setting.prepare(10, epoch=1, **PULL)
    assert setting.target.serving() == (0, 0), "though nothing of epoch 2 is committed yet"
    assert await setting.commit(4, epoch=2) is UpdateStatus.COMMITTED


async def test_commit_request_of_an_update_fails_if_a_prepare_request_replaces_that_update(setting):
    """If this commit succeeded, the bytes of the next update would overwrite the weights that serve."""
    gate = threading.Event()
    setting.pulls(gate=gate)
    await setting.prepare(**PULL)
    both = asyncio.gather(setting.commit(), setting.prepare(2, **PULL), return_exceptions=True)
    await asyncio.sleep(0)  # COMMIT now waits for the bytes, and PREPARE for the end of the receive
    gate.set()
    committed, prepared = await both
    assert isinstance(committed, NotPrepared) and prepared is UpdateStatus.PREPARED
    assert setting.target.serving() == (0, 0) and not setting.target.current.any()
    assert await setting.commit(2) is UpdateStatus.COMMITTED


@pytest.mark.parametrize("layout", [True, False], ids=["layout", "layout_id"])
async def test_receiver_rejects_buckets_that_split_weights_into_too_many_pieces(setting, monkeypatch, layout):
    monkeypatch.setattr(weight_receiver, "MAX_PIECES", LAYOUT.num_bytes - 1)
    named = {} if layout else {"layout": None, "layout_id": LAYOUT.layout_id}
    with pytest.raises(InvalidRequest, match="bucket_bytes must be at least 2 for these weights, got 1"):
        await setting.prepare(bucket_bytes=1, **PULL, **named)
