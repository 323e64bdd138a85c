"""The copy of staged weights on a worker's device."""

import time

import pytest
import torch

from pipelinerl.engines.weights.torch_shared_bytes import SharedBytes
from pipelinerl.plugins.external_engines.vllm.torch_device_copy import DeviceCopy, pin, unpin
from tests.patience import PATIENCE_S


def test_worker_on_the_cpu_reads_the_shared_memory_without_a_copy():
    with SharedBytes(16) as shared:
        copy = DeviceCopy(shared.tensor, torch.device("cpu"))
        assert copy.advance(1)
        assert copy.take().data_ptr() == shared.tensor.data_ptr()


class _Cuda:
    """Stands in for CUDA's runtime: a failed call leaves an error, which the next kernel launch raises and clears."""

    def __init__(self, result):
        self.result = result
        self.error = 0

    def cudaHostRegister(self, address, num_bytes, flags):
        self.error = self.result
        return self.result

    def cudaHostUnregister(self, address):
        self.error = self.result
        return self.result

    def launch(self, *_, **__):
        error, self.error = self.error, 0
        if error:
            raise RuntimeError("CUDA error: invalid argument")


@pytest.mark.parametrize("result", [0, 1])
def test_memory_that_cuda_does_not_pin_leaves_no_error_for_the_next_kernel(result, monkeypatch):
    cuda = _Cuda(result)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch, "ones", cuda.launch)
    host = torch.zeros(8, dtype=torch.uint8)
    assert pin(host) == (result == 0)
    cuda.launch()
    unpin(host)
    cuda.launch()


@pytest.mark.gpu
def test_memory_pinned_or_unpinned_twice_leaves_no_error_for_the_next_kernel_on_a_gpu():
    with SharedBytes(2**20) as shared:
        assert pin(shared.tensor)
        assert not pin(shared.tensor)
        torch.ones(1, device="cuda").sum().item()
        unpin(shared.tensor)
        unpin(shared.tensor)
        torch.ones(1, device="cuda").sum().item()


@pytest.mark.gpu
def test_closed_copy_leaves_its_memory_of_the_gpu_to_the_next():
    """A stock server that gets a new adapter makes a new copy."""
    device = torch.device("cuda")
    with SharedBytes(2**28) as shared:
        torch.ones(1, device=device)
        free = torch.cuda.mem_get_info(device)[0]
        for _ in range(2):
            copy = DeviceCopy(shared.tensor, device)
            assert copy.place == "memory of the GPU" and torch.cuda.mem_get_info(device)[0] <= free - 2**28
            copy.close()
            assert torch.cuda.mem_get_info(device)[0] > free - 2**28


@pytest.mark.gpu
@pytest.mark.parametrize("allowed", [True, False])
def test_each_commit_on_a_gpu_reads_the_bytes_that_were_staged_for_it(allowed):
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
