"""`DeviceCopy`: staged weights on their way from shared host memory to the worker's GPU, copied while it samples.

A commit that reads host memory pauses sampling for as long as PCIe takes: 0.3 to 0.7 s for 16 GB of pinned memory, 3 to
4 s of pageable memory. A commit from memory of the GPU takes 2 · 16 GB ÷ 3 TB/s = 11 ms. These times are estimates from
published bandwidths; the CUDA path has not been run.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import torch
from torch import Tensor

#: Free memory in bytes that the copy leaves on the GPU for libraries that allocate late, such as NCCL.
_SPARE: Final = 2 * 2**30


class DeviceCopy:
    """The staged weights as a commit reads them: copied to `device` where they fit, else in place on the host.

    Args:
        host: the staged weights, flat u8, mapped by several processes. For a GPU, the memory is pinned if CUDA can.
        device: the worker's device. Weights of a worker on the CPU stay where they are.
        allowed: False keeps the weights on the host, because other processes use the rest of the GPU.
    """

    def __init__(self, host: Tensor, device: torch.device, *, allowed: bool = True) -> None:
        self._host = host
        self._device = device
        self._copy: Tensor | None = None
        self._copied: Any = None  # the CUDA event after the latest copy
        self._commit: int | None = None  # the number of the commit that the latest copy is for
        self._place = "host memory"
        if device.type == "cuda":
            self._place = "pinned host memory" if pin(host) else "pageable host memory, which is slow"
            if allowed and torch.cuda.mem_get_info(device)[0] >= host.numel() + _SPARE:
                self._copy = torch.empty(host.numel(), dtype=torch.uint8, device=device)
                self._stream: Any = torch.cuda.Stream(device)
                self._place = "memory of the GPU"

    @property
    def place(self) -> str:
        """Description of the memory from which commits read: the GPU's, or the host's, pinned or not."""
        return self._place

    def advance(self, commit: int) -> bool:
        """Begin the copy for commit number `commit`, once for each number; return True once it is complete."""
        if self._copy is None:
            return True
        if self._commit != commit:
            self._stream.wait_stream(torch.cuda.current_stream())  # the last commit may still read the copy
            with torch.cuda.stream(self._stream):
                self._copy.copy_(self._host, non_blocking=True)
                self._copied = self._stream.record_event()
            self._commit = commit
        return bool(self._copied.query())

    def take(self) -> Tensor:
        """Return the staged weights, flat u8, after `advance` has returned True."""
        return self._host if self._copy is None else self._copy

    def close(self) -> None:
        """Release the memory of the GPU, and unpin that of the host; the object must not be used again."""
        if self._device.type == "cuda":
            self._copy = None
            torch.cuda.empty_cache()  # torch would keep the memory, and the next copy would not find it free
            unpin(self._host)


def pin(host: Tensor) -> bool:
    """Register mapped memory with CUDA, which then copies it at PCIe's full rate; return whether CUDA accepts it."""
    return _succeeded(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0))


def unpin(host: Tensor) -> None:
    """Undo `pin`, before the memory is unmapped; do nothing for memory that is not pinned."""
    _succeeded(torch.cuda.cudart().cudaHostUnregister(host.data_ptr()))


def _succeeded(result: Any) -> bool:
    """Return whether a call of CUDA's runtime succeeded; clear the error of a call that failed."""
    if int(result) == 0:
        return True
    # CUDA keeps the error, and torch would raise it after the next kernel launch. torch has no cudaGetLastError, so
    # launch a kernel here.
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")
    return False
