"""Copies between host and device with a change of dtype.

The device converts where possible (torch's own copies convert on the CPU), and copies to the host transfer the smaller
of the two dtypes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Copy values to the device, then convert them to `dtype`; copies from pinned memory are asynchronous."""
    return values.to(device, non_blocking=True).to(dtype)


class HostBuffer:
    """Reusable pinned host memory for copies from the device, one tensor at a time; it grows as needed."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def fetch(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """Copy values to the host in `dtype`; the result may share this buffer, which the next call overwrites."""
        if values.device.type == "cpu":
            return values.to(dtype)
        sent = values.to(dtype) if dtype.itemsize < values.dtype.itemsize else values
        size = sent.numel() * sent.element_size()
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=values.is_cuda)
        held = self._memory[:size].view(sent.dtype).view(sent.shape)
        held.copy_(sent)
        return held.to(dtype)
