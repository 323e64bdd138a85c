"""The JAX engine: continuous batching of Llama-family directories, on any device of XLA: CPU, TPU, CUDA.

It loads the same directories with the same decoder as the JAX trainer, so both compute the same numbers. Its weight
layout is that of all trainers. It has run on CPUs, including several simulated devices, but not yet on a TPU.
"""

from __future__ import annotations

import os
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from inference_contract.engine import Engine
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.weights.worker_endpoint import endpoints_of
from pipelinerl.errors import ModelError
from pipelinerl.models.decoder_config import Parameter, read_config
from pipelinerl.models.directory_files import text_config
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.jax.decoder import bound_memory, load_weights
from pipelinerl.plugins.jax.engine import program as jax_program
from pipelinerl.plugins.jax.engine.program import DecoderProgram, PromptAttention
from pipelinerl.plugins.jax.engine.runner import JaxRunner, JaxWeights
from trainer_contract.types import Device


def from_options(options: EngineOptions) -> Engine:
    """Return the engine that a recipe describes; logits are fp32 with either head precision. Raises `ModelError`."""
    options.refuse("the JAX engine", "weights", "kernels", "options")
    if options.threads is not None:  # XLA reads NPROC at its first computation
        os.environ.setdefault("NPROC", str(options.threads))
    tokenizer = ChatTokenizer.load(options.model_path)
    return BatchingEngine(
        options, load=lambda: load_runner(options), tokenizer=tokenizer, endpoints=endpoints_of(options)
    )


def load_runner(
    options: EngineOptions, *, cache_bytes: int | None = None, starts_early: bool | None = None
) -> JaxRunner:
    """Load the model and compile its programs, on the thread that runs it. Arguments and errors as in `assembled`."""
    runner = assembled(options, cache_bytes=cache_bytes, starts_early=starts_early)
    runner.warm_up()
    return runner


def assembled(options: EngineOptions, *, cache_bytes: int | None = None, starts_early: bool | None = None) -> JaxRunner:
    """Return the model with its cache of at most `cache_bytes` (None: no bound), without compiled programs. Raises
    `ModelError` for a model, device or context that is unusable, and for a cache that is too large.

    `starts_early` is passed to `JaxRunner`; None means True except on a CPU, whose cores are both device and host.
    """
    config = read_config(options.model_path)
    options.check_context(text_config(options.model_path))
    dtype: Any = jnp.dtype(options.dtype)
    entries = config.layers * options.slots * options.context_length * config.kv_heads * config.head_dim
    options.check_cache(2 * entries * dtype.itemsize, allowed=cache_bytes)
    bound_memory(options.memory_share)
    try:
        devices = jax.local_devices(backend=_PLATFORM[options.device])
    except RuntimeError as error:
        raise ModelError(f"device is {options.device}, but jax finds none: {error}; set auto or cpu") from error
    wanted = options.devices
    if wanted > len(devices):
        raise ModelError(f"devices is {wanted}, but this process has {len(devices)} of them; lower it")
    divided = {"key-value heads": config.kv_heads, "rows of the vocabulary": config.vocab}
    divided["intermediate features"] = config.intermediate
    for what, count in divided.items():
        if count % wanted:
            raise ModelError(f"devices={wanted} does not divide the model's {count} {what}; choose a divisor")
    mesh = Mesh(np.array(devices[:wanted]), ("tensor",))

    def place(parameter: Parameter) -> NamedSharding:
        return NamedSharding(mesh, P(*(axis if axis == "tensor" else None for axis in parameter.stacked_axes)))

    weights = JaxWeights(config, load_weights(options.model_path, config, place=place, dtype=dtype), place=place)
    heads_divided = NamedSharding(mesh, P(None, None, None, "tensor"))
    cache = jax_program.empty_cache(config, options, heads_divided)
    platform = mesh.devices.flat[0].platform
    prompts = PromptAttention.on(platform, devices=mesh.size, windows=config.window is not None)
    starts_early = platform != "cpu" if starts_early is None else starts_early
    return JaxRunner(DecoderProgram(config, prompts), weights, cache, starts_early=starts_early)


_PLATFORM: Final = {Device.AUTO: None, Device.CPU: "cpu", Device.CUDA: "cuda", Device.TPU: "tpu"}
