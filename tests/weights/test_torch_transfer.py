"""Hashing weights on a separate thread gives the right digest, and never reads bytes that were overwritten."""

import itertools
import time
from typing import final

import numpy as np
import pytest
import torch
import xxhash

from inference_contract.errors import OutOfRange
from inference_contract.weights import DType, ParameterSpec, WeightLayout
from pipelinerl import rng
from pipelinerl.weights import torch_transfer
from pipelinerl.weights.broadcast.sender import WeightSender
from pipelinerl.weights.layout import converted_by
from pipelinerl.weights.torch_transfer import (
    CudaStream,
    HostStream,
    OverlappedDigest,
    convert,
)
from tests.patience import PATIENCE_S

NUMBERS = torch.randint(0, 256, (10, 1000), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
EXPECTED = xxhash.xxh3_128(NUMBERS.numpy().tobytes()).hexdigest()


@final
class LazyStream:
    """A fake GPU stream that copies as late as possible: when a copy's result is awaited, into alternating buffers."""

    overlaps = True

    def __init__(self):
        self.exits = 0
        self._pinned = [torch.empty(0, dtype=torch.uint8)] * 2

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.exits += 1

    def mark_start(self):
        return None

    def to_host(self, data):
        """Return a copy that is made only when it is awaited, in the buffer that was used two copies before."""
        slot = self._pinned.pop(0)
        slot = slot if slot.numel() >= data.numel() else torch.empty(data.numel(), dtype=torch.uint8)
        self._pinned.append(slot)

        def landed():
            time.sleep(0.005)
            return slot[: data.numel()].copy_(data)

        return landed


@pytest.mark.parametrize(
    "stream", [HostStream(cores=2), HostStream(cores=8), LazyStream()], ids=["2 cores", "8 cores", "lazy stream"]
)
def test_digest_computed_on_a_separate_thread_equals_the_digest_of_the_bytes_in_order(stream):
    digest, staged = OverlappedDigest(stream), [torch.empty(1000, dtype=torch.uint8) for _ in range(2)]
    for number, row in enumerate(NUMBERS):
        digest.append(staged[number % 2].copy_(row))
    assert digest.hexdigest() == EXPECTED


@pytest.mark.parametrize("bucket_bytes", [100, 1000, 3000, 10**6], ids=["cut", "one_each", "three_each", "all"])
def test_sender_of_weights_never_overwrites_bytes_that_are_still_being_hashed(bucket_bytes):
    layout = WeightLayout(
        parameters=tuple(ParameterSpec(name=f"p{n}", shape=(1000,), dtype=DType.INT8) for n in range(10))
    )
    stream = LazyStream()

    def weights():
        yield from ((f"p{n}", row.view(torch.int8)) for n, row in enumerate(NUMBERS))

    sending = WeightSender(layout, weights, bucket_bytes, streams=lambda device: stream)
    sent = sending.send(None, deadline=time.monotonic() + PATIENCE_S)
    assert sent == EXPECTED and stream.exits == 1


def test_exception_in_the_thread_that_hashes_weights_is_raised_by_the_next_append():
    digest = OverlappedDigest(HostStream(cores=8))
    digest.append(torch.ones(3, requires_grad=True))  # hashing fails, because it cannot be converted to numpy
    with pytest.raises(RuntimeError, match="requires grad"):
        digest.append(NUMBERS[0])


@pytest.mark.gpu
def test_block_of_a_cuda_stream_waits_for_marked_work_and_not_for_later_work():
    device = torch.device("cuda", 0)
    stream, values = CudaStream(device), torch.zeros(1000, device=device)
    torch.cuda.synchronize()
    torch.cuda._sleep(10**8)
    values.fill_(1.0)
    stream.mark_start()
    torch.cuda._sleep(10**10)  # seconds
    passes = torch.cuda.current_stream(device).record_event()
    with stream:
        read = values.cpu()
    assert not passes.query(), "the read ended before the passes"
    assert (read == 1.0).all(), "the read came after the write"


FLOATS = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)


def layout(*dtypes, sizes=(7, 12, 5)):
    """Return a layout of parameters with odd sizes; if dtypes differ, some are not aligned to their element size."""
    return WeightLayout(
        parameters=tuple(
            ParameterSpec(name=f"p{row}", shape=(size,), dtype=dtype)
            for row, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True))
        )
    )


def values(wire):
    made = []
    for row, spec in enumerate(wire.parameters):
        drawn = rng.generator(row, "values").normal(size=spec.shape).astype(np.float32)
        made.append(torch.from_numpy(drawn).to(getattr(torch, spec.dtype.value)))
    return made


def in_bytes(tensors):
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors]).numpy()


@pytest.mark.parametrize("kept", list(itertools.product(FLOATS, repeat=3))[::4])
@pytest.mark.parametrize("sent", list(itertools.product(FLOATS, repeat=3))[::5])
def test_parameter_converted_to_another_dtype_is_rounded_to_nearest(sent, kept):
    wire, ours = layout(*sent), layout(*kept)
    tensors = values(wire)
    into = np.zeros(ours.num_bytes, np.uint8)
    convert(in_bytes(tensors), wire, into=into, layout=ours)
    expected = [
        tensor.to(getattr(torch, spec.dtype.value)) for tensor, spec in zip(tensors, ours.parameters, strict=True)
    ]
    assert np.array_equal(into, in_bytes(expected))


def test_dtype_conversion_of_weights_does_not_depend_on_the_block_size(monkeypatch):
    wire, ours = layout(*[DType.FLOAT32] * 3), layout(*[DType.BFLOAT16] * 3)
    whole, pieces = np.zeros(ours.num_bytes, np.uint8), np.zeros(ours.num_bytes, np.uint8)
    convert(in_bytes(values(wire)), wire, into=whole, layout=ours)
    monkeypatch.setattr(torch_transfer, "_BLOCK", 5)
    convert(in_bytes(values(wire)), wire, into=pieces, layout=ours)
    assert np.array_equal(whole, pieces) and whole.any()


def test_conversion_to_float16_rejects_values_out_of_range_and_keeps_infinity():
    wire, ours = layout(DType.BFLOAT16, sizes=(3,)), layout(DType.FLOAT16, sizes=(3,))
    into = np.zeros(ours.num_bytes, np.uint8)
    sent = [torch.tensor([1.0, -70000.0, float("inf")], dtype=torch.bfloat16)]
    with pytest.raises(OutOfRange, match=r"parameter 'p0' holds 7\.\d+e\+04, beyond the 65504 of float16"):
        convert(in_bytes(sent), wire, into=into, layout=ours)
    convert(in_bytes([torch.tensor([1.0, 2.0, float("inf")], dtype=torch.bfloat16)]), wire, into=into, layout=ours)
    assert torch.from_numpy(into).view(torch.float16).tolist() == [1.0, 2.0, float("inf")]


def test_only_layouts_whose_parameters_are_all_floating_point_are_converted():
    assert converted_by(layout(*FLOATS)) == FLOATS
    assert converted_by(layout(DType.FLOAT32, DType.INT8, DType.FLOAT32)) == ()
