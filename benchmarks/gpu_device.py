"""Measure a device's limits, to which `gpu_check` compares its results, and define the sizes of the checks (`Scale`).

Times start and end with the device idle. Each time is the best of several tries: a bound, not an average.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from inference_contract.weights import Backend
from pipelinerl.plugins.warmstart.tiny_decoder import DecoderShape, random_decoder
from pipelinerl.rng import generator


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Sizes of a check: a trainer step has `trained_tokens` tokens, in segments of `segment` tokens on average.

    `head_vocab` is the vocabulary of the output layer that is checked by itself; `copy_bytes` and `matmul` are sizes
    for measuring the device.
    """

    shape: DecoderShape
    slots: int
    prompt: int
    answer: int
    parity_sequences: int
    trained_tokens: int
    segment: int
    head_vocab: int
    copy_bytes: int
    matmul: int
    rounds: int
    updates: int


#: 0.87 billion parameters: large enough for memory to dominate a decode step, small enough for two trainers on one GPU.
FULL: Final = Scale(
    shape=DecoderShape(
        hidden=2048, layers=16, heads=16, kv_heads=8, intermediate=6144, vocab=32768, max_positions=4096
    ),
    slots=64,
    prompt=128,
    answer=384,
    parity_sequences=32,
    trained_tokens=16384,
    segment=512,
    head_vocab=151936,
    copy_bytes=2**31,
    matmul=8192,
    rounds=7,
    updates=5,
)

QUICK: Final = Scale(
    shape=DecoderShape(hidden=64, layers=2, heads=4, kv_heads=2, intermediate=128, vocab=512, max_positions=256),
    slots=8,
    prompt=16,
    answer=48,
    parity_sequences=4,
    trained_tokens=512,
    segment=48,
    head_vocab=65536,
    copy_bytes=2**24,
    matmul=256,
    rounds=2,
    updates=2,
)


def wait(device: torch.device) -> None:
    """Wait until the device has finished all work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def best_seconds(work: Callable[[], object], device: torch.device, *, tries: int = 5) -> float:
    """Return the seconds of the fastest of several tries of `work`, after a warm-up that is discarded."""
    times = []
    for number in range(tries + 1):
        wait(device)
        began = time.perf_counter()
        work()
        wait(device)
        if number:
            times.append(time.perf_counter() - began)
    return min(times)


def copy_seconds(num_bytes: int, device: torch.device) -> float:
    """Return the seconds of copying `num_bytes` within the device's memory."""
    origin = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(origin)
    return best_seconds(lambda: target.copy_(origin), device)


def flops_per_second(size: int, device: torch.device) -> float:
    """Return the FLOP/s of a bf16 matrix product of `size` x `size`, the fastest of several tries."""
    # Random numbers: a matrix product of equal numbers draws less power and is unrealistically fast.
    numbers = generator(0, "gpu_check", "matmul").standard_normal((size, size), dtype=np.float32)
    left = torch.from_numpy(numbers).to(device, torch.bfloat16)
    right, out = left.T.contiguous(), torch.empty_like(left)
    return 2.0 * size**3 / best_seconds(lambda: torch.mm(left, right, out=out), device)


def save_model(scale: Scale, folder: Path) -> None:
    """Save the random decoder on which the checks run as a bf16 model directory."""
    model: Any = random_decoder(scale.shape)
    model.to(torch.bfloat16).save_pretrained(folder)


def backend_of(device: torch.device) -> Backend:
    """Return NCCL if a second GPU can take the other rank, since NCCL refuses two ranks on one; otherwise gloo."""
    return Backend.NCCL if device.type == "cuda" and torch.cuda.device_count() > 1 else Backend.GLOO


def describe(device: torch.device) -> str:
    """Return the device's name and memory."""
    if device.type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    return f"{torch.cuda.device_count()} x {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
