"""The choice of an attention implementation for a torch trainer, which includes a trial of the varlen kernel."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipelinerl import rng
from pipelinerl.trainers.torch.packed.attention import AttentionPlan, Planner
from pipelinerl.trainers.torch.packed.attention_choice import (
    HeadShapes,
    SegmentAttention,
    chosen,
    described,
    why_not_varlen,
)
from pipelinerl.trainers.torch.packed.segments import SegmentPlan
from pipelinerl.trainers.torch.packed.shared_beginnings import Distinct
from pipelinerl.trainers.torch.packed.varlen import VarlenKernel, VarlenPlan, torch_kernel
from trainer_contract.errors import SpecError
from trainer_contract.types import Kernels, Precision

#: Inputs of the varlen kernel's trial: the lengths of three segments; the number of first tokens that the second
#: segment shares with the first; and the attention windows (None: unlimited).
_LENGTHS: Final = (150, 90, 1)
_SHARED: Final = 60
_WINDOWS: Final = (None, 33)
#: Largest allowed difference between the varlen kernel and bucketed attention in fp32, relative to the largest value.
#: Rounding to bf16 causes about 2^-9, a wrong mask about 1.
_APART: Final = 5e-2


class Planning(NamedTuple):
    """The chosen `Planner`, a function that makes attention plans, and its description for the log."""

    plan_of: Planner
    description: str


def planning(
    requested: SegmentAttention,
    precision: Precision,
    device: torch.device,
    config: Mapping[str, Any],
    kernels: Kernels = Kernels.FAST,
) -> Planning:
    """Choose the planner for a device and the configuration of a text model.

    Raises SpecError if the varlen kernel was requested but fails, or if batch-invariant kernels were requested on a
    device other than a CPU.
    """
    if kernels is Kernels.BATCH_INVARIANT:
        if device.type != "cpu":
            raise SpecError(
                f"model.kernels = batch_invariant runs on a CPU, and the device is {device.type}; leave it out"
            )
        return Planning(partial(SegmentPlan.of, kernels=kernels), "buckets of segments, in batch-invariant tiles")
    heads = HeadShapes.of(config)
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    why_not = why_not_varlen(
        device=device.type,
        precision=precision,
        capability=torch.cuda.get_device_capability(device) if on_gpu else None,
        has_kernel=torch.backends.cuda.is_flash_attention_available() and torch.version.hip is None,
        widths=heads.widths,
    )
    if chosen(requested, why_not) is SegmentAttention.VARLEN:
        kernel = torch_kernel()
        why_not = failed_trial(kernel, heads=heads, device=device, dtype=torch.bfloat16)
        if chosen(requested, why_not) is SegmentAttention.VARLEN:
            return Planning(partial(VarlenPlan.of, kernel=kernel), described(requested, None))
    return Planning(SegmentPlan.of, described(requested, why_not))


def failed_trial(kernel: VarlenKernel, *, heads: HeadShapes, device: torch.device, dtype: torch.dtype) -> str | None:
    """Compare the kernel with bucketed attention in fp32; if it fails or differs too much, return the reason."""
    positions = np.concatenate([np.arange(length) for length in _LENGTHS]).astype(np.int32)
    source = np.arange(len(positions))
    source[_LENGTHS[0] : _LENGTHS[0] + _SHARED] = np.arange(_SHARED)
    kept = source == np.arange(len(positions))
    distinct = Distinct(np.flatnonzero(kept), (np.cumsum(kept) - 1)[source])
    (width,), draw, tokens = heads.widths, rng.generator(0, "varlen_trial"), len(distinct.kept)
    sizes = [(tokens, count, width) for count in (heads.queries, heads.keys, heads.keys, heads.queries)]
    drawn = [torch.from_numpy(draw.standard_normal(size, dtype=np.float32)).to(device, dtype) for size in sizes]
    buckets = SegmentPlan.of(positions, device, distinct)
    try:
        varlen = VarlenPlan.of(positions, device, distinct, kernel=kernel)
        for window in _WINDOWS:
            expected = _attended(buckets, [each.float() for each in drawn], window)
            for got, reference in zip(_attended(varlen, drawn, window), expected, strict=True):
                apart = float((got.float() - reference).abs().max() / reference.abs().max())
                if not apart <= _APART:
                    return f"in its trial the kernel's result differed from buckets by {apart:.2g} of the largest value"
    except (RuntimeError, ValueError, TypeError) as error:
        return f"in its trial the kernel failed: {str(error).splitlines()[0]}"
    return None


def _attended(plan: AttentionPlan, drawn: list[Tensor], window: int | None) -> tuple[Tensor, ...]:
    inputs, cotangent = [each.detach().requires_grad_() for each in drawn[:3]], drawn[3]
    with torch.enable_grad(), torch.autocast(cotangent.device.type, enabled=False):
        attended = plan.attend(*inputs, window=window, scale=None)
    return attended.detach(), *torch.autograd.grad(attended, inputs, cotangent)
