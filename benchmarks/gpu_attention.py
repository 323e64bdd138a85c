"""The check `attention` of `gpu_check`: compare torch's kernel (`varlen`) with buckets of padded segments.

ragged, shared, window   output and gradients of one layer in bf16, by the kernel and by buckets, compared with buckets
                         in fp32; time of kernel and buckets, forward and backward. In `shared`, eight answers share
                         each prompt; `window` is sliding-window attention
step                     error of the whole trainer's log-probs from fp32, before and after a step, and a step's time,
                         with kernel and with buckets
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.gpu_device import Scale, wait
from benchmarks.gpu_trainer import random_batch
from benchmarks.measure import Paired, Row, paired, seconds_of
from benchmarks.torch_step import packed, rl_step, trainer_of
from pipelinerl.rng import generator
from pipelinerl.trainers.torch.packed.attention import AttentionPlan
from pipelinerl.trainers.torch.packed.segments import SegmentPlan
from pipelinerl.trainers.torch.packed.shared_beginnings import Distinct
from pipelinerl.trainers.torch.packed.varlen import VarlenKernel, VarlenPlan, torch_kernel
from trainer_contract.trainer import Trainer
from trainer_contract.types import MicroBatch, Precision

#: Tolerances: relative difference of attention from fp32, and the log-probs' error with the kernel over the buckets'.
_APART: Final = 2e-2
_WORSE: Final = 1.2
_ANSWERS: Final = 8
_RATE: Final = 1e-5


class Layer(NamedTuple):
    """Inputs of one attention layer over a micro-batch of `tokens` tokens, and a plan for each implementation."""

    name: str
    tokens: int
    plans: dict[str, AttentionPlan]
    drawn: Sequence[Tensor]
    window: int | None

    def apart(self) -> dict[str, float]:
        """Return by implementation the largest relative difference of output and gradients from buckets in fp32."""
        exact = _attended(self.plans["buckets"], [each.float() for each in self.drawn], self.window)
        return {arm: _largest(_attended(plan, self.drawn, self.window), exact) for arm, plan in self.plans.items()}

    def timed(self, rounds: int) -> Paired:
        """Time the kernel and the buckets, forward and backward, in seconds."""

        def once(plan: AttentionPlan) -> None:
            _attended(plan, self.drawn, self.window)
            wait(self.drawn[0].device)

        return paired({arm: seconds_of(partial(once, plan)) for arm, plan in self.plans.items()}, rounds)


def check_attention(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Compare kernel and buckets on single layers and on whole steps; without CUDA report that nothing was checked."""
    if device.type != "cuda":
        return [Row("varlen against buckets", "not checked: the kernel is CUDA's")], {"checked": False}
    rows: list[Row] = []
    results: dict[str, Any] = {"checked": True}
    for layer in layers(torch_kernel(), scale, device, torch.bfloat16):
        apart, timings = layer.apart(), layer.timed(scale.rounds)
        met = apart["varlen"] <= _APART
        rows += [
            Row(f"attention, {layer.name}: varlen's largest |Δ| from fp32", apart["varlen"], f"<= {_APART:g}", met),
            Row("    that of buckets in bf16", apart["buckets"]),
            Row("    buckets / varlen, time", timings.ratio("buckets", "varlen")),
        ]
        results[layer.name] = {
            "apart": apart,
            "tokens": layer.tokens,
            "computed": len(layer.drawn[0]),
            **_times(timings),
        }
    more, results["step"] = _steps(folder, scale, device)
    return rows + more, results


def layers(kernel: VarlenKernel, scale: Scale, device: torch.device, dtype: torch.dtype) -> Iterator[Layer]:
    """Yield attention layers of the scale's size, for the varlen kernel and for buckets."""
    ragged, window = random_batch(scale), scale.segment // 2
    for name, batch, limit in (("ragged", ragged, None), ("shared", _shared(scale), None), ("window", ragged, window)):
        distinct = Distinct.of(batch)
        plans: dict[str, AttentionPlan] = {
            "varlen": VarlenPlan.of(batch.position_ids, device, distinct, kernel=kernel),
            "buckets": SegmentPlan.of(batch.position_ids, device, distinct),
        }
        yield Layer(name, batch.num_tokens, plans, _drawn(scale, len(distinct.kept), device, dtype), limit)


def _steps(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    batch = random_batch(scale)
    step = partial(rl_step, batch=batch, learning_rate=_RATE, device=device)

    def logprobs(trainer: Trainer) -> NDArray[np.float32]:
        before = trainer.forward([batch])[0]
        step(trainer)
        return np.concatenate((before, trainer.forward([batch])[0]))

    reference = trainer_of(folder, device, options={"attention": "buckets", "compile": False})
    exact = logprobs(reference)
    reference.close()
    kinds = ("varlen", "buckets")
    trainers = {arm: trainer_of(folder, device, Precision.BF16, options={"attention": arm}) for arm in kinds}
    errors = {arm: float(np.abs(logprobs(trainer) - exact).mean()) for arm, trainer in trainers.items()}
    timings = paired({arm: seconds_of(partial(step, trainer)) for arm, trainer in trainers.items()}, scale.rounds)
    for trainer in trainers.values():
        trainer.close()
    ratio = errors["varlen"] / errors["buckets"]
    rows = [
        Row("trainer: error of log-probs, varlen / buckets", ratio, f"<= {_WORSE:g}", ratio <= _WORSE),
        Row("    buckets, mean |Δ logp| from fp32 before and after a step", errors["buckets"]),
        Row("    a step, buckets / varlen, time", timings.ratio("buckets", "varlen")),
    ]
    return rows, {"errors": errors, **_times(timings)}


def _times(timings: Paired) -> Mapping[str, Any]:
    return {"buckets_over_varlen": timings.ratio("buckets", "varlen").as_dict(), "seconds": timings.as_dict()}


def _shared(scale: Scale) -> MicroBatch:
    """Return a micro-batch of about as many tokens as `random_batch`, in groups of answers that share their prompt."""
    draw, prompt = generator(0, "gpu_check", "shared"), scale.segment // 2
    sequences = []
    for _ in range(max(1, scale.trained_tokens // (scale.segment * _ANSWERS))):
        prompt_ids = draw.integers(0, scale.shape.vocab, prompt)
        for length in draw.integers(scale.segment // 4, scale.segment * 3 // 4, _ANSWERS):
            sequences.append([*prompt_ids.tolist(), *draw.integers(0, scale.shape.vocab, length).tolist()])
    return packed(
        sequences, [prompt] * len(sequences), [np.zeros(len(each) - prompt, np.float32) for each in sequences]
    )


def _drawn(scale: Scale, tokens: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    shape, draw = scale.shape, generator(0, "gpu_check", "attention")
    keys, width = shape.kv_heads or shape.heads, shape.hidden // shape.heads
    sizes = [(tokens, heads, width) for heads in (shape.heads, keys, keys, shape.heads)]
    return [torch.from_numpy(draw.standard_normal(size, dtype=np.float32)).to(device, dtype) for size in sizes]


def _attended(plan: AttentionPlan, drawn: Sequence[Tensor], window: int | None) -> tuple[Tensor, ...]:
    inputs = [each.detach().requires_grad_() for each in drawn[:3]]
    attended = plan.attend(*inputs, window=window, scale=None)
    return attended.detach(), *torch.autograd.grad(attended, inputs, drawn[3])


def _largest(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    pairs = zip(results, exact, strict=True)
    return max(float((ours.float() - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)
