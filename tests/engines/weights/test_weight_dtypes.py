"""Weights that arrive in another dtype than the engine's are converted, or rejected before any broadcast."""

import asyncio
import time

import numpy as np
import pytest
import torch

from inference_contract.errors import InvalidRequest, LayoutMismatch, NotPrepared, OutOfRange, Persistence
from inference_contract.weights import Backend, DType, UpdateStatus, WeightLayout
from pipelinerl.engines.weights.torch_shared_bytes import SharedBytes, attach
from pipelinerl.engines.weights.worker_endpoint import WorkerEndpointFactory
from tests.engines.weights.test_weight_receiver import LAYOUT, Setting, digest_of
from tests.patience import PATIENCE_S


def wire_of(dtype):
    """Return the layout in which the parameters arrive if the trainer sends them in `dtype`."""
    return WeightLayout(parameters=tuple(row.model_copy(update={"dtype": dtype}) for row in LAYOUT.parameters))


async def update(setting, wire, data, version, **named):
    """Run an update from its PREPARE request to COMMIT; the fields in `named` replace the layout in PREPARE."""
    await setting.prepare(version, **(named or {"layout": wire}))
    for start, end in wire.pieces(64):
        deadline = time.monotonic() + PATIENCE_S
        await asyncio.to_thread(setting.trainer.broadcast, data[start:end], deadline=deadline)
    return await setting.commit(version, digest=digest_of(data))


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
async def test_half_precision_update_is_converted_to_float32_and_its_digest_is_of_the_sent_bytes(dtype):
    setting, wire = Setting(), wire_of(dtype)
    await setting.join()
    values = torch.linspace(-3, 3, 32).to(getattr(torch, dtype.value))
    data = values.view(torch.uint8)
    assert await update(setting, wire, data, 1) is UpdateStatus.COMMITTED
    assert np.array_equal(setting.target.current.view(np.float32), values.float().numpy())
    assert setting.receiver.digest == digest_of(data)
    assert setting.target.finished == [setting.target.current.tobytes()], "what is finished is converted already"


async def test_prepare_request_may_name_a_known_weight_layout_by_its_id_instead_of_sending_it():
    setting, wire = Setting(), wire_of(DType.BFLOAT16)
    await setting.join()
    data = torch.ones(32, dtype=torch.bfloat16).view(torch.uint8)
    await update(setting, wire, data, 1)
    assert await update(setting, wire, data, 2, layout=None, layout_id=wire.layout_id) is UpdateStatus.COMMITTED
    own = torch.full((32,), 2.0).view(torch.uint8)
    await update(setting, LAYOUT, own, 3, layout=None, layout_id=LAYOUT.layout_id)
    assert setting.target.current.view(np.float32).tolist() == [2.0] * 32
    with pytest.raises(NotPrepared, match="is not known here"):
        await setting.prepare(4, layout=None, layout_id=wire_of(DType.FLOAT16).layout_id)


async def test_update_in_an_unsupported_dtype_is_rejected_with_a_list_of_supported_dtypes():
    setting = Setting()
    await setting.join()
    sentence = r"'first' must have dtype float32 or bfloat16 or float16, got float64"
    with pytest.raises(LayoutMismatch, match=sentence) as refusal:
        await setting.prepare(layout=wire_of(DType.FLOAT64))
    assert refusal.value.persistence is Persistence.PERMANENT
    assert NotPrepared("x").persistence is Persistence.TRANSIENT


async def test_update_whose_conversion_overflows_keeps_the_old_weights(monkeypatch):
    setting = Setting()
    half = wire_of(DType.FLOAT16)
    monkeypatch.setattr(type(setting.target), "layout", property(lambda _: half))
    setting.target._staged = np.zeros(half.num_bytes, np.uint8)
    await setting.join()
    data = torch.full((32,), 1e6).view(torch.uint8)
    with pytest.raises(OutOfRange, match="beyond the 65504 of float16"):
        await update(setting, LAYOUT, data, 1)
    assert setting.target.serving() == (0, 0)


def test_shared_memory_for_dtype_conversion_is_reserved_on_demand():
    endpoints, shared = WorkerEndpointFactory(frozenset([Backend.GLOO])), SharedBytes(100, further=2**40)
    with shared:
        mapped = attach(shared.path, 100 + 64)
        endpoints.lend(shared)
        endpoints.buffer(shared.tensor, 64)[:] = 7
        assert mapped[100:].tolist() == [7] * 64 and mapped[:100].tolist() == shared.tensor.tolist()
        with pytest.raises(InvalidRequest, match=r"need \d+ more bytes of shared memory"):
            endpoints.buffer(shared.tensor, 2**40)
