"""Checks of a recipe's `engine.options` for vLLM: fields of its `AsyncEngineArgs`, except those set elsewhere.

Only `check_fields` imports vLLM, because vLLM reads the environment when it is imported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Final

from pipelinerl.errors import ModelError, RecipeError

#: Fields that may not be set in `engine.options`: each with the setting to use instead, or what sets it.
_SET_BY: Final[Mapping[str, str]] = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "engine.dtype",
    "quantization": "engine.weights",
    "seed": "run.seed",
    "max_model_len": "engine.context_length",
    "max_num_seqs": "engine.slots",
    "tensor_parallel_size": "engine.devices",
    "data_parallel_size": "engine.count",
    "device_ids": "launch.engine_devices",
    "gpu_memory_utilization": "engine.memory_share",
    "kv_cache_memory_bytes": "engine.memory_share",
    "scheduling_policy": "the engine, which samples by priority",
    "skip_tokenizer_init": "the engine, which has the tokenizer itself",
    "generation_config": "the engine: each request has its own sampling parameters",
    "logprobs_mode": "the engine: log-probs are of the distribution sampled from",
    "async_scheduling": "the engine, which records the weights of each step as it ends",
    "enable_prefix_caching": "the engine, which salts the cache with the weights' version",
    "worker_extension_cls": "the engine, which receives weights through it",
    "pipeline_parallel_size": "the engine, whose weights are divided by tensor parallelism alone",
    "disable_log_stats": "the engine, which has its own counters",
}

#: The engine sets these fields on a CPU, where vLLM would otherwise crash or wait for a compiler; on a GPU the user
#: may.
_ON_CPU: Final = frozenset({"enable_chunked_prefill", "max_num_batched_tokens", "enforce_eager"})


def check_names(options: Iterable[str]) -> None:
    """Reject options that are set elsewhere; does not import vLLM.

    Raises:
        RecipeError: names the option and the setting to use instead.
    """
    for name in options:
        if name in _SET_BY:
            raise RecipeError(f"engine.options.{name} is set by {_SET_BY[name]}; leave it out")


def check_fields(options: Collection[str]) -> None:
    """Reject options that the installed vLLM does not have.

    Raises:
        ModelError: names the option and similar ones.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = [field.name for field in fields(AsyncEngineArgs) if not field.name.startswith("_")]
    for name in options:
        if name not in known:
            alike = get_close_matches(name, known)
            hint = f"did you mean {' or '.join(alike)}?" if alike else "see `vllm serve --help`"
            raise ModelError(f"engine.options.{name} is no field of vLLM's AsyncEngineArgs; {hint}")


def check_on_cpu(options: Iterable[str]) -> None:
    """Reject options that the engine itself sets on a CPU. Raises `ModelError`."""
    if own := [name for name in options if name in _ON_CPU]:
        raise ModelError(f"engine.options.{own[0]} is set by the engine on a CPU; leave it out")
