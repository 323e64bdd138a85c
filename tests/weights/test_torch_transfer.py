"""Hashing on a thread gives the same digest, and never reads bytes that were overwritten."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Self, final

import pytest
import torch
import xxhash

from inference_contract.weights import DType, ParameterSpec, WeightLayout
from pipelinerl.weights.broadcast.sender import WeightSender
from pipelinerl.weights.torch_transfer import HostStream, Landed, OverlappedDigest, TransferStream
from tests.patience import PATIENCE_S

NUMBERS = torch.randint(0, 256, (10, 1000), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
EXPECTED = xxhash.xxh3_128(NUMBERS.numpy().tobytes()).hexdigest()


@final
class LazyStream:
    """A GPU's stream at its slowest: a copy happens only when somebody waits for it, into two buffers in turn."""

    overlaps = True

    def __init__(self) -> None:
        self.exits = 0
        self._pinned = [torch.empty(0, dtype=torch.uint8)] * 2

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.exits += 1

    def to_host(self, data: torch.Tensor) -> Landed:
        """Copy `data` late, into the buffer of the copy before the last one."""
        slot = self._pinned.pop(0)
        slot = slot if slot.numel() >= data.numel() else torch.empty(data.numel(), dtype=torch.uint8)
        self._pinned.append(slot)

        def landed() -> torch.Tensor:
            time.sleep(0.005)
            return slot[: data.numel()].copy_(data)

        return landed


@pytest.mark.parametrize(
    "stream", [HostStream(cores=2), HostStream(cores=8), LazyStream()], ids=["few", "many", "lazy"]
)
def test_digest_is_that_of_the_bytes_in_order(stream: TransferStream) -> None:
    digest, staged = OverlappedDigest(stream), [torch.empty(1000, dtype=torch.uint8) for _ in range(2)]
    for number, row in enumerate(NUMBERS):
        digest.append(staged[number % 2].copy_(row))
    assert digest.hexdigest() == EXPECTED


@pytest.mark.parametrize("bucket_bytes", [100, 1000, 3000, 10**6], ids=["cut", "one_each", "three_each", "all"])
def test_sender_never_overwrites_what_is_still_hashed(bucket_bytes: int) -> None:
    layout = WeightLayout(
        parameters=tuple(ParameterSpec(name=f"p{n}", shape=(1000,), dtype=DType.INT8) for n in range(10))
    )
    stream = LazyStream()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from ((f"p{n}", row.view(torch.int8)) for n, row in enumerate(NUMBERS))

    sending = WeightSender(layout, weights, bucket_bytes, streams=lambda device: stream)
    sent = sending.send(None, deadline=time.monotonic() + PATIENCE_S)
    assert sent == EXPECTED and stream.exits == 1


def test_failure_of_the_thread_is_raised_by_the_next_append() -> None:
    digest = OverlappedDigest(HostStream(cores=8))
    digest.append(torch.ones(3, requires_grad=True))  # has no numpy form
    with pytest.raises(RuntimeError, match="requires grad"):
        digest.append(NUMBERS[0])
