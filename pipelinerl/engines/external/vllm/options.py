"""What a recipe's `engine.options` may say to vLLM: fields of its `AsyncEngineArgs`, but those that are set elsewhere.

vLLM itself is imported only by `check_fields`, since it reads the environment as it is imported.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Final

from pipelinerl.errors import ModelError, RecipeError

#: What the recipe says in its own words.
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
    "generation_config": "the engine: a request says how it samples",
    "logprobs_mode": "the engine: log-probs are of the distribution sampled from",
    "async_scheduling": "the engine, which names a step's weights as it ends",
    "enable_prefix_caching": "the engine, which salts the cache with the weights' version",
    "worker_extension_cls": "the engine, whose weights come through it",
    "pipeline_parallel_size": "the engine, whose weights are divided by tensor parallelism alone",
    "disable_log_stats": "the engine, which counts itself",
}

#: What the engine sets on a CPU, where vLLM would die or wait for a compiler otherwise; on a GPU it is the recipe's.
_ON_CPU: Final = frozenset({"enable_chunked_prefill", "max_num_batched_tokens", "enforce_eager"})


def check_names(options: Iterable[str]) -> None:
    """Refuse what is set elsewhere; vLLM is not asked.

    Raises:
        RecipeError: names the option, and who sets it.
    """
    for name in options:
        if name in _SET_BY:
            raise RecipeError(f"engine.options.{name} is set by {_SET_BY[name]}; leave it out")


def check_fields(options: Collection[str]) -> None:
    """Refuse what the installed vLLM does not know.

    Raises:
        ModelError: names the option, and those that look like it.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = [field.name for field in fields(AsyncEngineArgs) if not field.name.startswith("_")]
    for name in options:
        if name not in known:
            alike = get_close_matches(name, known)
            hint = f"did you mean {' or '.join(alike)}?" if alike else "see `vllm serve --help`"
            raise ModelError(f"engine.options.{name} is no field of vLLM's AsyncEngineArgs; {hint}")


def check_on_cpu(options: Iterable[str]) -> None:
    """Refuse what the engine has to set on a CPU. Raises `ModelError`."""
    if own := [name for name in options if name in _ON_CPU]:
        raise ModelError(f"engine.options.{own[0]} is set by the engine on a CPU; leave it out")
