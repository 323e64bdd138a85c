"""The choice of an attention implementation for a torch trainer, which includes a trial of the varlen kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipelinerl import rng
from pipelinerl.trainers.torch.packed.attention import AttentionPlan, Scores
from pipelinerl.trainers.torch.packed.attention_choice import (
    PADDED,
    HeadShapes,
    SegmentAttention,
    chosen,
    described,
    refuse_padded,
    why_not_varlen,
)
from pipelinerl.trainers.torch.packed.segments import PaddedPlan, SegmentPlan
from pipelinerl.trainers.torch.packed.sequence_parallel import SequenceGroup
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


#: Function that makes a plan for packed segments. Its first argument is each token's position [T], which restarts at 0
#: in each segment. If its third argument is None, all tokens are computed.
Planner = Callable[[NDArray[np.int32], torch.device, Distinct | None, SequenceGroup | None], AttentionPlan | PaddedPlan]


class Planning(NamedTuple):
    """The chosen `Planner` and its description for the log."""

    plan_of: Planner
    description: str


def planning(
    requested: SegmentAttention,
    precision: Precision,
    device: torch.device,
    config: Mapping[str, Any],
    kernels: Kernels = Kernels.FAST,
    *,
    packs: bool = True,
    cp: int = 1,
    agree: Callable[[int], int] = int,
) -> Planning:
    """Choose the planner for a device and the configuration of a text model.

    Without `packs`, segments become padded rows, and `agree` is that of `PaddedPlan.of`. Raises SpecError if the varlen
    kernel was requested but fails, if batch-invariant kernels were requested on a device other than a CPU, or for what
    padded rows cannot do, such as sharing a micro-batch between `cp` processes.
    """
    if not packs:
        refuse_padded(requested, kernels, cp=cp)
        return Planning(partial(PaddedPlan.of, agree=agree), f"padded rows ({PADDED})")
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
            sinks = failed_trial(kernel, heads=heads, device=device, dtype=torch.bfloat16, with_sinks=True)
            return Planning(
                partial(VarlenPlan.of, kernel=kernel, takes_sinks=sinks is None), described(requested, None)
            )
    return Planning(SegmentPlan.of, described(requested, why_not))


def failed_trial(
    kernel: VarlenKernel,
    *,
    heads: HeadShapes,
    device: torch.device,
    dtype: torch.dtype,
    with_sinks: bool = False,
) -> str | None:
    """Compare the kernel with bucketed attention in fp32; if it fails or differs too much, return the reason."""
    positions = np.concatenate([np.arange(length) for length in _LENGTHS]).astype(np.int32)
    source = np.arange(len(positions))
    source[_LENGTHS[0] : _LENGTHS[0] + _SHARED] = np.arange(_SHARED)
    kept = source == np.arange(len(positions))
    distinct = Distinct(np.flatnonzero(kept), (np.cumsum(kept) - 1)[source])
    (width,), draw, tokens = heads.widths, rng.generator(0, "varlen_trial"), len(distinct.kept)
    sizes = [(tokens, count, width) for count in (heads.queries, heads.keys, heads.keys, heads.queries)]
    drawn = [torch.from_numpy(draw.standard_normal(size, dtype=np.float32)).to(device, dtype) for size in sizes]
    sinks = torch.linspace(-1.0, 3.0, heads.queries, device=device) if with_sinks else None
    buckets = SegmentPlan.of(positions, device, distinct)
    try:
        varlen = VarlenPlan.of(positions, device, distinct, kernel=kernel)
        for window in _WINDOWS:
            expected = _attended(buckets, [each.float() for each in drawn], Scores(window, sinks=sinks))
            for got, reference in zip(_attended(varlen, drawn, Scores(window, sinks=sinks)), expected, strict=True):
                apart = float((got.float() - reference).abs().max() / reference.abs().max())
                if not apart <= _APART:
                    return f"in its trial the kernel's result differed from buckets by {apart:.2g} of the largest value"
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        return f"in its trial the kernel failed: {str(error).splitlines()[0]}"
    return None


def _attended(plan: AttentionPlan, drawn: list[Tensor], scores: Scores) -> tuple[Tensor, ...]:
    query, key, value = inputs = [each.detach().requires_grad_() for each in drawn[:3]]
    if scores.sinks is not None:
        sinks = scores.sinks.detach().requires_grad_()
        inputs, scores = [*inputs, sinks], scores._replace(sinks=sinks)
    with torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
        attended = plan.attend(query, key, value, scores)
    return attended.detach(), *torch.autograd.grad(attended, inputs, drawn[3])
