"""If a peer in a weight group does not send what it announced, the update fails and the engine serves the old weights.

A hostile rank 0, in the trainer's place, makes attacks drawn from seeds; a failing test names the seed and the attack.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import psutil
import pytest
import torch

from inference_contract.errors import ContractError
from inference_contract.weights import Backend, UpdateStatus
from pipelinerl import rng
from pipelinerl.engines.weights.weight_receiver import WeightReceiver
from pipelinerl.engines.weights.worker_endpoint import OwnProcess
from pipelinerl.enums import Receiver
from pipelinerl.errors import DeadlineError, ModelError, UpdateError
from pipelinerl.plugins.external_engines.vllm.engine import from_options as vllm_engine
from pipelinerl.system.background import in_background
from tests.engines.weights.test_weight_receiver import BYTES, LAYOUT, Setting
from tests.fakes.engine_options import engine_options
from tests.patience import PATIENCE_S, SOON_S

KEY = "pieces"
BUCKET_BYTES = 32
PIECES = LAYOUT.pieces(BUCKET_BYTES)
AGREEMENT = LAYOUT.agreement(BUCKET_BYTES).encode()

Draw = np.random.Generator
#: Rank 0's announcement, and the bytes of each weight piece that it then sends. None as announcement means that none is
#: made; None as a piece means that rank 0 leaves the group.
Attack = tuple[bytes | None, list[bytes | None]]


def _honest():
    return [BYTES[start:end].tobytes() for start, end in PIECES]


def longer(draw):
    pieces = _honest()
    at = int(draw.integers(len(pieces)))
    pieces[at] = draw.bytes(BUCKET_BYTES + int(draw.choice([1, 2, 31, 32, 4096, 2**20, 2**24])))
    return AGREEMENT, pieces


def shorter(draw):
    pieces = _honest()
    pieces[int(draw.integers(len(pieces)))] = draw.bytes(int(draw.integers(1, BUCKET_BYTES)))
    return AGREEMENT, pieces


def other_bytes(draw):
    pieces = _honest()
    pieces[int(draw.integers(len(pieces)))] = draw.bytes(BUCKET_BYTES)
    return AGREEMENT, pieces


def out_of_order(draw):
    return AGREEMENT, list(reversed(_honest()))


def leaves(draw):
    return AGREEMENT, [*_honest()[: int(draw.integers(len(PIECES)))], None]


def other_announcement(draw):
    wrong = [b"", b"\x00", b"\xff\xfe" + AGREEMENT, AGREEMENT + b" ", AGREEMENT[:-1], draw.bytes(64), b"x" * 2**20]
    return wrong[int(draw.integers(len(wrong)))], _honest()


def silence(draw):
    return (None, [None]) if draw.integers(2) else (AGREEMENT, [None])


ATTACKS: tuple[Callable[[Draw], Attack], ...] = (
    longer, shorter, other_bytes, out_of_order, leaves, other_announcement, silence
)  # fmt: skip


class Peers:
    """An engine's weight receiver, whose membership in the group runs in a separate process; the test is rank 0."""

    def __init__(self):
        self.setting = Setting()
        before = psutil.Process().children()
        self.endpoints = OwnProcess()
        (self.nursery,) = set(psutil.Process().children()) - set(before)
        self.setting.receiver = WeightReceiver(self.setting.target, endpoints=self.endpoints)
        self.generation = 0
        self.version = 0

    async def updated(self, announced, pieces, *, patience_s=PATIENCE_S, sends_s=PATIENCE_S):
        """Run a whole weight update as rank 0; return its status, or raise the error with which it fails.

        Args:
            patience_s: the engine's timeout.
            sends_s: rank 0's timeout per piece; gloo may miss that a peer died during a send, and then waits this long.
        """
        self.generation, self.version = self.generation + 1, self.version + 1
        joined = self.setting.receiver.init_process_group(self.setting.joining(self.generation, timeout_s=PATIENCE_S))
        rank_0 = await self.setting.met(self.generation, joined)
        about = {"version": self.version, "bucket_bytes": BUCKET_BYTES, "timeout_s": patience_s}
        await self.setting.prepare(**about, generation=self.generation, pieces_key=KEY)
        sending = in_background("send", lambda: self._send(rank_0, announced, pieces, sends_s))
        try:
            return await self.setting.commit(**about)
        finally:
            await asyncio.wait({asyncio.wrap_future(sending)})
            rank_0.close()

    def _send(self, rank_0, announced, pieces, patience_s):
        if announced is not None:
            rank_0._store.set(KEY, announced)
        with suppress(UpdateError, DeadlineError):  # raised when the engine has detected the attack and left the group
            for piece in pieces:
                if piece is None:
                    rank_0.close()
                else:
                    data = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
                    rank_0.broadcast(data, deadline=time.monotonic() + patience_s)


@pytest.fixture
async def peers():
    made = Peers()
    yield made
    await made.setting.receiver.close()
    made.endpoints._end()
    made.setting.rendezvous.close()


@pytest.mark.parametrize(
    "cases",
    [
        range(14),
        *(pytest.param(range(at, at + 100), marks=[pytest.mark.chaos, pytest.mark.timeout(1800)])
          for at in range(0, 500, 100)),
    ],
)  # fmt: skip
async def test_engine_keeps_its_old_weights_after_weight_updates_by_hostile_peers(cases, peers, capsys):
    """Every 14 attacks, an honest update succeeds."""
    target, ended = peers.setting.target, Counter[str]()
    assert await peers.updated(AGREEMENT, _honest()) is UpdateStatus.COMMITTED
    for case in cases:
        attack = ATTACKS[case % len(ATTACKS)]
        announced, pieces = attack(rng.generator(case, "peer"))
        before = target.serving()
        patience_s = 0.3 if attack is silence else PATIENCE_S
        with pytest.raises(ContractError) as raised:
            await peers.updated(announced, pieces, patience_s=patience_s, sends_s=SOON_S)
        ended[f"{attack.__name__}: {raised.value.code}"] += 1
        assert target.serving() == before and np.array_equal(target.current, BYTES), f"case {case}, {attack.__name__}"
        if case % 14 == 13:
            assert await peers.updated(AGREEMENT, _honest()) is UpdateStatus.COMMITTED
    assert {"longer: peer_lost", "other_bytes: digest_mismatch", "other_announcement: peer_lost"} <= ended.keys()
    if len(cases) > 14:
        with capsys.disabled():
            print(f"\nhostile peers, cases {cases}: {dict(ended)}")


async def test_engine_updates_its_weights_after_the_fork_server_of_its_weight_receivers_was_killed(peers):
    peers.nursery.kill()
    peers.nursery.wait()
    assert await peers.updated(AGREEMENT, _honest()) is UpdateStatus.COMMITTED


def test_receiving_weights_in_a_separate_process_is_rejected_with_nccl_or_vllm(peers):
    assert peers.endpoints.reaches(Backend.GLOO, BYTES) and not peers.endpoints.reaches(Backend.NCCL, BYTES)
    with pytest.raises(
        ModelError, match=r"vLLM engine receives weights in its own way, got engine\.receiver=own_process"
    ):
        vllm_engine(engine_options(receiver=Receiver.OWN_PROCESS))
