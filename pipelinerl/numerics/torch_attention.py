"""Choices among the kernels of torch's `scaled_dot_product_attention` on CUDA; on a CPU nothing changes.

Torch tries cuDNN first on recent GPUs, then flash attention, then memory-efficient attention, and last plain products,
which keep all scores in fp32. Flash attention has no fp32 and takes no mask. Until torch 2.13 at least, the
memory-efficient kernel needs as many key heads as query heads.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_FLASH_DTYPES: Final = (torch.bfloat16, torch.float16)
#: The oldest compute capability on which flash attention runs.
_FLASH_CAPABILITY: Final = (8, 0)
#: Flash attention takes heads whose width is a multiple of the first number and at most the second.
_FLASH_WIDTHS: Final = (8, 256)


def avoid_cudnn() -> None:
    """Exclude cuDNN from torch's choice of attention kernels, in the whole process.

    cuDNN builds a plan for every new shape, in tens of milliseconds, and almost every prefill has a new shape.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


def fits_flash(query: Tensor) -> bool:
    """Return whether flash attention without a mask takes the query's dtype, which autocast may change, and width, and
    runs on its GPU.
    """
    kind, (multiple, most) = query.device.type, _FLASH_WIDTHS
    if query.is_cuda and torch.cuda.get_device_capability(query.device) < _FLASH_CAPABILITY:
        return False
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    return dtype in _FLASH_DTYPES and query.shape[-1] % multiple == 0 and query.shape[-1] <= most


def heads_for_kernel(query: Tensor, key: Tensor, value: Tensor, *, masked: bool) -> tuple[Tensor, Tensor]:
    """Return key and value for a kernel on CUDA, with repeated heads unless flash attention can share them."""
    return (key, value) if fits_flash(query) and not masked else repeated(query, key, value)


def attend_last(query: Tensor, key: Tensor, value: Tensor, *, scale: float) -> Tensor:
    """Compute causal attention of the last T of L tokens with flash attention; CUDA only, if `fits_flash`.

    The operator aligns its causal mask with the last key. `torch.nn.attention.bias.causal_lower_right` calls it too,
    but creates a tensor [2, T, L] in the host's memory.
    """
    out: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, is_causal=True, scale=scale)[0]
    return out


def repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return key and value with each head repeated for the query heads that share it."""
    times = query.shape[1] // key.shape[1]
    return key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
