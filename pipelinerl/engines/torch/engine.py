"""The torch engine: continuous batching over any Hugging Face causal language model directory, on CPU or CUDA."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from inference_contract.engine import Engine
from pipelinerl.choices import WeightFormat
from pipelinerl.engines.batching.batching_engine import BatchingEngine, BatchingSettings
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.torch.forward import ForwardKind, load_for_decoding
from pipelinerl.engines.torch.row_cache import CacheShape
from pipelinerl.engines.torch.runner import TorchRunner
from pipelinerl.errors import ModelError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.numerics import torch_head
from pipelinerl.weights.pull import PullSource
from trainer_contract.types import Device, HeadPrecision, WeightDType


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchEngineSettings:
    """What a torch engine needs to know.

    Attributes:
        model_path: a local Hugging Face directory.
        slots: sequences that run at once.
        context_length: most tokens of a sequence, prompt included; None takes the model's.
        cache_bytes: most memory for keys and values; None for whatever slots and context need.
        dtype: of weights, cache and arithmetic; log-probs are fp32 whatever it is.
        memory_share: most of the GPU's memory for this process; None for all of it.
        weights: how linear layers are kept; cache and the arithmetic between them are in `dtype` all the same.
        head_precision: of the output layer.
        threads: CPU threads of the decode thread; None leaves torch's default.
        forward: a straight line where the model fits it, or always transformers' modules.
    """

    model_path: Path
    batching: BatchingSettings
    slots: int = 64
    context_length: int | None = None
    cache_bytes: int | None = None
    dtype: WeightDType = WeightDType.FLOAT32
    weights: WeightFormat = WeightFormat.NATIVE
    head_precision: HeadPrecision = HeadPrecision.MODEL
    device: Device = Device.AUTO
    memory_share: float | None = None
    threads: int | None = None
    forward: ForwardKind = ForwardKind.AUTO


def build(settings: TorchEngineSettings, *, pull: PullSource | None = None) -> Engine:
    """An engine that is loaded by `start`. Raises `ModelError` for a directory without a usable tokenizer."""
    return BatchingEngine(
        settings.batching,
        load=lambda: load_runner(settings),
        tokenizer=ChatTokenizer.load(settings.model_path),
        pull=pull,
    )


def from_options(options: EngineOptions) -> Engine:
    """The engine that a recipe describes."""
    options.check_one_device("the torch engine")
    options.check_no_options("the torch engine")
    return build(
        TorchEngineSettings(
            model_path=options.model_path,
            batching=BatchingSettings(model_id=options.model_id, max_waiting=options.max_waiting, seed=options.seed),
            slots=options.slots,
            context_length=options.context_length,
            dtype=options.dtype,
            weights=options.weights,
            head_precision=options.head_precision,
            device=options.device,
            memory_share=options.memory_share,
            threads=options.threads,
        ),
        pull=options.pull,
    )


def load_runner(settings: TorchEngineSettings) -> TorchRunner:
    """The model with its cache; called on the thread that will run it.

    Raises:
        ModelError: there is no usable model or device, the model's context is shorter than asked for, the cache exceeds
            its budget, or its weights cannot be kept in the format asked for.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    device, dtype = _device(settings.device), getattr(torch, settings.dtype.value)
    share = settings.memory_share if device.type == "cuda" else None
    if share is not None:  # the process fails before a neighbour on the GPU does
        torch.cuda.set_per_process_memory_fraction(share)
    model = load_for_decoding(settings.model_path, dtype=settings.dtype, device=device)
    config: Any = model.config
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    context = settings.context_length or longest
    if context is None or (longest is not None and context > longest):
        raise ModelError(
            f"context_length must be at most the {longest} positions of {settings.model_path}, got {context}"
        )
    needed = CacheShape.of(text, slots=settings.slots, context=context).num_bytes(dtype)
    allowed = settings.cache_bytes if share is None else _bytes_left(share)
    if allowed is not None and needed > allowed:
        raise ModelError(
            f"{settings.slots} slots of {context} tokens need {needed} bytes of cache, allowed are {allowed}; lower "
            "slots or context_length"
        )
    if settings.head_precision is HeadPrecision.FP32:
        torch_head.to_fp32(model, served=dtype)
    runner = TorchRunner(
        model, slots=settings.slots, context_length=context, forward=settings.forward, weights=settings.weights
    )
    runner.warm_up()
    return runner


def _device(device: Device) -> torch.device:
    if device is Device.TPU:
        raise ModelError("the torch engine runs on auto, cpu or cuda, got the device tpu; use engine.type jax")
    if device is Device.AUTO:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device.value)


def _bytes_left(share: float) -> int:
    """What the share leaves beside the model."""
    return int(share * torch.cuda.get_device_properties(0).total_memory) - torch.cuda.memory_allocated()
