"""Tests of which copies are made between host and device. The CUDA tensors are fake, so no GPU is needed."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipelinerl.plugins.torch_mesh.mesh_worker import HostBuffer
from pipelinerl.trainers.torch import adamw as optimizer_module
from pipelinerl.trainers.torch.adamw import PiecewiseAdamW, to_device
from pipelinerl.trainers.torch.options import OptimizerOptions
from trainer_contract.types import OptimizerSpec

CUDA = torch.device("cuda", 0)


class Transfers(TorchDispatchMode):
    """Records the dtypes (from, to) of each copy that changes the device."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self._record(args[0], result)
        elif func is torch.ops.aten.copy_.default:
            self._record(args[1], args[0])
        return result

    def _record(self, source, target):
        if source.device.type != target.device.type:
            self.dtypes.append((source.dtype, target.dtype))


def test_bf16_moments_are_copied_to_the_device_in_bf16_and_converted_there():
    with FakeTensorMode(), Transfers() as transfers:
        moved = to_device(torch.empty(5, dtype=torch.bfloat16), CUDA, torch.float32)
    assert (moved.device, moved.dtype) == (CUDA, torch.float32)
    assert transfers.dtypes == [(torch.bfloat16, torch.bfloat16)]


@pytest.mark.parametrize(
    ("held", "wanted", "sent"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.float32, torch.float32),
    ],
)
def test_rows_are_copied_to_the_host_in_the_smaller_of_their_own_and_the_requested_dtype(held, wanted, sent):
    with FakeTensorMode(), Transfers() as transfers:
        rows = HostBuffer().fetch(torch.empty(3, 4, dtype=held, device=CUDA), wanted)
    assert (rows.device.type, rows.dtype, rows.shape) == ("cpu", wanted, (3, 4))
    assert transfers.dtypes == [(sent, sent)]


def test_rows_already_on_the_host_are_not_copied():
    rows = torch.ones(3)
    assert HostBuffer().fetch(rows, torch.float32) is rows


def test_step_count_is_copied_to_the_device_once_for_all_pieces_of_a_parameter(monkeypatch):
    monkeypatch.setattr(optimizer_module, "_PIECE", 4)
    parameter = torch.nn.Parameter(torch.empty(20, device="meta"))
    parameter.grad = torch.empty(20, device="meta")
    groups = [{"params": [parameter], "weight_decay": 0.0}]
    optimizer = PiecewiseAdamW(groups, OptimizerSpec(), OptimizerOptions(), seed=0, masters={})
    with Transfers() as transfers:
        optimizer.step()
    assert transfers.dtypes == [(torch.float32, torch.float32)]
