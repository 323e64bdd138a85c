"""Differences between vLLM and the contract: rejected requests and options, and the seed of continued samples."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final

from inference_contract.errors import InvalidRequest
from pipelinerl import rng
from pipelinerl.engines.batching.sequence import Request, Sequence
from pipelinerl.errors import ModelError, RecipeError
from pipelinerl.models.model_shape import mixture_of

#: The transfer backend in vLLM's workers, and the extension class that makes them import it (`transfer`).
BACKEND: Final = "pipelinerl"
EXTENSION: Final = "pipelinerl.plugins.external_engines.vllm.transfer.SharedWeights"
#: Interval in seconds between polls whether the workers have copied the weights; 16 GB take 300 to 700 ms.
COPY_POLL_S: Final = 0.01
#: The only `moe_backend` of vLLM that keeps experts in the layout of the model's files.
KEEPS_EXPERTS: Final = "triton"
#: vLLM 0.32 raises temperatures between 0 and this value to this value (`SamplingParams.__post_init__`).
LEAST_TEMPERATURE: Final = 0.01
#: vLLM 0.32 rejects higher temperatures (`SamplingParams._verify_args`).
MOST_TEMPERATURE: Final = 2.0


def check_request(request: Request) -> None:
    """Raise `InvalidRequest` for a temperature that vLLM rejects, or replaces by another (with other log-probs)."""
    if request.temperature > MOST_TEMPERATURE:
        raise InvalidRequest(
            f"vLLM samples at temperatures up to {MOST_TEMPERATURE:g}, got {request.temperature:g}", param="temperature"
        )
    if 0 < request.temperature < LEAST_TEMPERATURE:
        raise InvalidRequest(
            f"vLLM samples at temperature 0 and from {LEAST_TEMPERATURE:g} up, got {request.temperature:g}; set 0, "
            "which is greedy, or a higher temperature",
            param="temperature",
        )


def check_continued(request: Request) -> None:
    """Raise `InvalidRequest` for penalties or a `response_format` that vLLM would apply only to its own tokens."""
    change = request.change
    depends = request.response_format is not None or (change is not None and change.penalizes)
    if depends and not request.shares_prompt:
        raise InvalidRequest(
            "prefixes: vLLM applies penalties and response_format to the tokens that it samples itself; request the "
            "whole answer, or leave them out",
            param="prefixes",
        )


def sampling_of(sequence: Sequence) -> dict[str, Any]:
    """Return vLLM's sampling parameters of one sample, all stated, because a server may have defaults of its own."""
    request, begun, change = sequence.request, len(sequence.prefix), sequence.request.change
    return {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "frequency_penalty": change.frequency_penalty if change else 0.0,
        "presence_penalty": change.presence_penalty if change else 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": (dict(change.bias) or None) if change else None,
        "min_tokens": 0,
        # vLLM reads a generator from its beginning, so a continued sample with the same seed would repeat its noise.
        "seed": rng.key(sequence.noise_key, "continued", begun) if begun else sequence.noise_key,
        "max_tokens": sequence.token_limit,
        "stop_token_ids": sorted(request.stop_ids),
        "logprobs": request.num_top,  # the sampled token is reported in addition to these likeliest ones
        "detokenize": False,
    }


def structure_of(request: Request) -> dict[str, Any]:
    """Return vLLM's parameter for the request's `response_format`; an empty dict if the request has none."""
    form = request.response_format
    if form is None:
        return {}
    schema = {"json_object": True} if form.json_schema is None else {"json": form.json_schema.definition}
    return {"structured_outputs": schema}


def check_experts_on_cpu(path: Path) -> None:
    """Raise `ModelError` for a model with experts: vLLM on CPU repacks them, and would misread an update."""
    if mixture_of(path) is not None:
        raise ModelError(
            f"vLLM on a CPU repacks the experts of the model in {path} and cannot load new ones; use engine.type = "
            '"torch", or vLLM on a GPU'
        )


def check_experts_on_gpu(path: Path, options: Mapping[str, Any]) -> None:
    """Raise `ModelError` for experts unless `options` select the kernel that keeps their layout, as updates need."""
    if mixture_of(path) is not None and options.get("moe_backend") != KEEPS_EXPERTS:
        raise ModelError(
            f"vLLM may shuffle the experts of the model in {path} for its kernel, and would misread updates; set "
            f'engine.options.moe_backend = "{KEEPS_EXPERTS}", whose layout is that of the files, or use engine.type = '
            '"torch"'
        )


def share_without_copy(
    share: float | None, device_bytes: int, weight_bytes: int, *, default: float
) -> tuple[float, bool]:
    """Divide the engine's `share` of a GPU between vLLM and a copy of the next weights, which makes commits fast.

    None means `default`, vLLM's own share. Return vLLM's share, and True if there is room for the copy. If `share` is
    less than three times the weights, the copy would leave too small a KV cache. vLLM then gets all of `share`, and the
    second value is False.
    """
    share = default if share is None else share
    if share * device_bytes < 3 * weight_bytes:
        return share, False
    return share - weight_bytes / device_bytes, True


# --- engine.options ---------------------------------------------------------------------------------------------------
#
# `engine.options` are fields of vLLM's `AsyncEngineArgs`. Only `check_fields` imports vLLM, because vLLM reads the
# environment when it is imported.

#: Fields that may not be set in `engine.options`, each with the setting or component that determines it.
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
    "weight_transfer_config": "the engine, which receives weights through it",
    "pipeline_parallel_size": "the engine, whose weights are divided by tensor parallelism alone",
    "disable_log_stats": "the engine, which has its own counters",
}

#: Fields that the engine sets on a CPU, where vLLM would otherwise crash or wait for a compiler.
_ON_CPU: Final = frozenset({"enable_chunked_prefill", "max_num_batched_tokens", "enforce_eager"})


def check_names(options: Iterable[str]) -> None:
    """Raise `RecipeError` for an option that another setting of the recipe determines; does not import vLLM."""
    for name in options:
        if name in _SET_BY:
            raise RecipeError(f"engine.options.{name} is set by {_SET_BY[name]}; leave it out")


def check_fields(options: Collection[str]) -> None:
    """Raise `ModelError` for an option that the installed vLLM does not have, naming similar ones."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    known = [field.name for field in fields(AsyncEngineArgs) if not field.name.startswith("_")]
    for name in options:
        if name not in known:
            alike = get_close_matches(name, known)
            hint = f"did you mean {' or '.join(alike)}?" if alike else "see `vllm serve --help`"
            raise ModelError(f"engine.options.{name} is no field of vLLM's AsyncEngineArgs; {hint}")


def check_on_cpu(options: Iterable[str]) -> None:
    """Raise `ModelError` for options that the engine itself sets on a CPU."""
    if own := [name for name in options if name in _ON_CPU]:
        raise ModelError(f"engine.options.{own[0]} is set by the engine on a CPU; leave it out")
