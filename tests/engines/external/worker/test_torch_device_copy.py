"""The copy of staged weights on a worker's device."""

from __future__ import annotations

import time

import pytest
import torch

from pipelinerl.engines.external.worker.torch_device_copy import DeviceCopy
from pipelinerl.engines.external.worker.torch_shared_bytes import SharedBytes
from tests.patience import PATIENCE_S


def test_worker_on_the_cpu_reads_the_shared_memory_without_a_copy() -> None:
    with SharedBytes(16) as shared:
        copy = DeviceCopy(shared.tensor, torch.device("cpu"))
        assert copy.advance(1)
        assert copy.take().data_ptr() == shared.tensor.data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("allowed", [True, False])
def test_each_commit_on_a_gpu_reads_the_bytes_that_were_staged_for_it(allowed: bool) -> None:
    """The second commit is cancelled after its copy; the third must not read this copy."""
    device = torch.device("cuda")
    with SharedBytes(2**26) as shared:
        copy = DeviceCopy(shared.tensor, device, allowed=allowed)
        assert copy.place == ("memory of the GPU" if allowed else "pinned host memory")
        for commit in (1, 2, 3):
            shared.tensor.fill_(commit)
            until = time.monotonic() + PATIENCE_S
            while not copy.advance(commit):
                assert time.monotonic() < until
            if commit != 2:
                assert copy.take().device.type == ("cuda" if allowed else "cpu")
                assert bool((copy.take().to(device) == commit).all())
