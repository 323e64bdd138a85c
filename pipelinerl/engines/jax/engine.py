"""The JAX engine: continuous batching over Llama-family directories, on whatever XLA runs on: CPU, TPU, CUDA.

It loads what the JAX trainer loads with the same decoder, so both compute the same numbers; its layout is that of any
trainer of the same directory. Run on CPUs so far, simulated several of them included; written for TPUs, which it has
not met.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from inference_contract.engine import Engine
from pipelinerl.choices import WeightFormat
from pipelinerl.engines.batching.batching_engine import BatchingEngine, BatchingSettings
from pipelinerl.engines.jax import program as jax_program
from pipelinerl.engines.jax.attention import PromptAttention
from pipelinerl.engines.jax.program import DecoderProgram
from pipelinerl.engines.jax.runner import JaxRunner
from pipelinerl.engines.jax.weights import JaxWeights
from pipelinerl.engines.options import EngineOptions
from pipelinerl.errors import ModelError
from pipelinerl.models.decoder_config import DecoderConfig, Parameter, read_config
from pipelinerl.models.jax import memory as jax_memory
from pipelinerl.models.jax.checkpoint import load_weights
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.weights.pull import PullSource
from trainer_contract.types import Device, WeightDType


@dataclass(frozen=True, slots=True, kw_only=True)
class JaxEngineSettings:
    """What a JAX engine needs to know.

    Attributes:
        model_path: a local Hugging Face directory of a decoder that `read_config` knows.
        slots: sequences that run at once.
        context_length: most tokens of a sequence, prompt included; None takes the model's.
        cache_bytes: most memory for keys and values; None for whatever slots and context need.
        dtype: of weights, cache and arithmetic; norms, softmax, logits and log-probs are fp32 whatever it is.
        device: where the model runs; `auto` takes a TPU, else a GPU, else the CPU.
        devices: how many share the model, heads and vocabulary divided among them.
        memory_share: most of each GPU's memory, which JAX reserves; None for three quarters.
    """

    model_path: Path
    batching: BatchingSettings
    slots: int = 64
    context_length: int | None = None
    cache_bytes: int | None = None
    dtype: WeightDType = WeightDType.FLOAT32
    device: Device = Device.AUTO
    devices: int = 1
    memory_share: float | None = None


def build(settings: JaxEngineSettings, *, pull: PullSource | None = None) -> Engine:
    """An engine that is loaded, and whose programs are compiled, by `start`. Raises `ModelError`: no tokenizer."""
    return BatchingEngine(
        settings.batching,
        load=lambda: load_runner(settings),
        tokenizer=ChatTokenizer.load(settings.model_path),
        pull=pull,
    )


def from_options(options: EngineOptions) -> Engine:
    """The engine that a recipe describes; both head precisions are the same to it, whose logits are always fp32.

    Raises:
        ModelError: weights are to be quantised, or no usable tokenizer is there.
    """
    if options.weights is not WeightFormat.NATIVE:
        raise ModelError(f"a JAX engine serves native weights, got {options.weights}; use engine.type torch")
    options.check_no_options("the JAX engine")
    if options.threads is not None:  # XLA reads it once, when the process first computes something
        os.environ.setdefault("NPROC", str(options.threads))
    return build(
        JaxEngineSettings(
            model_path=options.model_path,
            batching=BatchingSettings(model_id=options.model_id, max_waiting=options.max_waiting, seed=options.seed),
            slots=options.slots,
            context_length=options.context_length,
            dtype=options.dtype,
            device=options.device,
            devices=options.devices,
            memory_share=options.memory_share,
        ),
        pull=options.pull,
    )


def load_runner(settings: JaxEngineSettings) -> JaxRunner:
    """The model with its cache, its programs compiled; called on the thread that will run it. Raises as `assembled`."""
    runner = assembled(settings)
    runner.warm_up()
    return runner


def assembled(settings: JaxEngineSettings) -> JaxRunner:
    """The model with its cache; nothing is compiled yet.

    Raises:
        ModelError: there is no usable model or device, the context is longer than the model's, or the cache exceeds
            its budget.
    """
    config = read_config(settings.model_path)
    context = _context(settings)
    dtype: Any = jnp.dtype(settings.dtype)
    needed = 2 * config.layers * settings.slots * context * config.kv_heads * config.head_dim * dtype.itemsize
    if settings.cache_bytes is not None and needed > settings.cache_bytes:
        raise ModelError(
            f"{settings.slots} slots of {context} tokens need {needed} bytes of cache, allowed are "
            f"{settings.cache_bytes}; lower slots or context_length"
        )
    mesh = _mesh(settings, config)

    def place(parameter: Parameter) -> NamedSharding:
        return NamedSharding(mesh, P(*(axis if axis == "tensor" else None for axis in parameter.stacked_axes)))

    weights = JaxWeights(config, load_weights(settings.model_path, config, place=place, dtype=dtype), place=place)
    heads_divided = NamedSharding(mesh, P(None, None, None, "tensor"))
    cache = jax_program.empty_cache(config, slots=settings.slots, context=context, dtype=dtype, sharding=heads_divided)
    prompts = PromptAttention.on(mesh.devices.flat[0].platform, devices=mesh.size)
    return JaxRunner(DecoderProgram(config, prompts), weights, cache)


_PLATFORM: Final = {Device.AUTO: None, Device.CPU: "cpu", Device.CUDA: "cuda", Device.TPU: "tpu"}


def _mesh(settings: JaxEngineSettings, config: DecoderConfig) -> Mesh:
    """The first devices of this process, along one axis."""
    jax_memory.bound(settings.memory_share)
    try:
        found = jax.local_devices(backend=_PLATFORM[settings.device])
    except RuntimeError as error:
        raise ModelError(f"device is {settings.device}, but jax finds none: {error}; set auto or cpu") from error
    wanted = settings.devices
    if wanted > len(found):
        raise ModelError(f"devices is {wanted}, but this process has {len(found)} of them; lower it")
    divided = {"key-value heads": config.kv_heads, "rows of the vocabulary": config.vocab}
    divided["intermediate features"] = config.intermediate
    for what, count in divided.items():
        if count % wanted:
            raise ModelError(f"devices={wanted} does not divide the model's {count} {what}; choose a divisor")
    return Mesh(np.array(found[:wanted]), ("tensor",))


def _context(settings: JaxEngineSettings) -> int:
    """The context asked for, or the model's."""
    longest = json.loads((settings.model_path / "config.json").read_text()).get("max_position_embeddings")
    context = settings.context_length or longest
    if context is None or (longest is not None and context > longest):
        raise ModelError(
            f"context_length must be at most the {longest} positions of {settings.model_path}, got {context}"
        )
    return int(context)
