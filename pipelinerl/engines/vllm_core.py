"""`VllmCore`: all that this project uses of vLLM's engine core, in one file, for the one series that it fits.

vLLM's `AsyncLLM` is a client of the same core: what it adds (a tokenizer, text, stop strings, a stream per request) is
here already, and what it leaves out is the version of the weights behind each step's tokens.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, final

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.executor import Executor

from inference_contract.schemas import OnUpdate, WeightLayout
from pipelinerl.engines.batching.sequence import Sequence
from pipelinerl.engines.torch_shared_bytes import SharedBytes
from pipelinerl.errors import ModelError

#: How long the core's process may take to end before it is killed: nothing in it is worth waiting for.
_CORE_ENDS_S: Final = 1.0

_PAUSES: Final = {
    OnUpdate.CONTINUE: "keep",
    OnUpdate.RECOMPUTE_KV: "keep",
    OnUpdate.ABORT: "abort",
    OnUpdate.DRAIN: "wait",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """How the core runs a model.

    Attributes:
        device: `cpu`, `cuda`, or `auto` for whatever the installed vLLM was built for.
        devices: how many share the model, by tensor parallelism.
        cache_bytes: memory for keys and values; None lets vLLM measure what the device has left.
    """

    model_path: Path
    slots: int
    context_length: int
    dtype: str
    device: str = "auto"
    devices: int = 1
    cache_bytes: int | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step did to one sample; `ended` when the core will not go on with it, whatever the reason."""

    sample_id: str
    token_ids: Items[int]
    logprobs: Items[float]
    ended: bool


@dataclass(frozen=True, slots=True)
class Step:
    """What a step brought; `serving` is (epoch, version) of the weights that ran it, None when none ran."""

    serving: tuple[int, int] | None
    samples: list[Sampled]


@final
class VllmCore:
    """A running core. Used from the event loop in which it was started.

    Every method but `close` raises vLLM's `EngineDeadError` when the core's process has died.
    """

    def __init__(self, client: Any, staged: SharedBytes) -> None:
        self._client = client
        self.staged = staged
        self.cache_bytes = 0

    @classmethod
    async def start(cls, settings: CoreSettings, layout: WeightLayout, serving: tuple[int, int]) -> Self:
        """Start the core's process, which loads the model; blocks the event loop meanwhile.

        Raises:
            ModelError: vLLM cannot serve this model here.
        """
        if settings.device not in ("auto", current_platform.device_type):
            raise ModelError(
                f"the installed vLLM runs on {current_platform.device_type}, the recipe asks for {settings.device}; "
                "install the other build, or say engine.device=auto"
            )
        try:
            config = _arguments(settings).create_engine_config()
            _check_heads(config.model_config.get_head_size(), settings.model_path)
            client = EngineCoreClient.make_async_mp_client(config, Executor.get_class(config), log_stats=False)
        except (ValueError, RuntimeError, OSError) as error:
            raise ModelError(f"vLLM cannot serve {settings.model_path}: {str(error).partition(chr(10))[0]}") from error
        assert isinstance(client, AsyncMPClient)
        with SharedBytes(layout.num_bytes) as staged:
            core = cls(client, staged)
            sizes = await core._in_workers("pipelinerl_attach", str(staged.path), layout.model_dump_json(), os.getpid())
        core.cache_bytes = sum(sizes)
        await core.name_version(*serving)
        return core

    def close(self) -> None:
        """End the core's process; blocks until it has ended."""
        self._client.shutdown(timeout=_CORE_ENDS_S)

    # --- samples -------------------------------------------------------------------------------------------------

    async def add(self, sample_id: str, sequence: Sequence, *, stop_ids: frozenset[int], salt: str) -> None:
        """Begin a sample. Samples of one prompt and one `salt` share their prompt's cache."""
        request = sequence.request
        params = SamplingParams(
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=sequence.noise_key,
            max_tokens=request.token_limit,
            stop_token_ids=sorted(stop_ids),
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            watermarking=False,
        )
        await self._client.add_request_async(
            EngineCoreRequest(
                request_id=sample_id,
                prompt_token_ids=request.prompt_token_ids,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=salt,
                data_parallel_rank=None,
            )
        )

    async def abort(self, sample_ids: list[str]) -> None:
        """Free what these samples hold; nothing more comes of them."""
        await self._client.abort_requests_async(sample_ids)

    async def next_step(self) -> Step:
        """Wait for a step's outputs. Those that have come already are answered without a turn of the event loop."""
        outputs = await self._client.get_output_async()
        label = outputs.weight_version
        serving = None
        if label is not None:
            epoch, _, version = label.partition(".")
            serving = int(epoch), int(version)
        return Step(serving, [_sampled(output) for output in outputs.outputs])

    # --- weights -------------------------------------------------------------------------------------------------

    async def pause(self, on_update: OnUpdate) -> None:
        """Stop between two steps; what runs is kept, ended with `abort`, or awaited first, as `on_update` says."""
        await self._client.pause_scheduler_async(mode=_PAUSES[on_update], clear_cache=False)

    async def resume(self) -> None:
        """Go on."""
        await self._client.resume_scheduler_async()

    async def load_staged(self) -> None:
        """Every worker loads the staged weights; the core must be paused."""
        await self._in_workers("pipelinerl_commit")

    async def name_version(self, epoch: int, version: int) -> None:
        """The weights that sample from the next step on."""
        await self._client.set_weight_version_async(f"{epoch}.{version}")

    async def forget_cache(self) -> None:
        """Prompts, and what has been sampled, are computed anew when the core resumes."""
        await self._client.reset_prefix_cache_async(reset_running_requests=True)

    async def _in_workers(self, method: str, *arguments: Any) -> list[Any]:
        results: list[Any] = await self._client.collective_rpc_async(method, None, arguments)
        return results


def _sampled(output: EngineCoreOutput) -> Sampled:
    chosen = output.new_logprobs
    logprobs = [] if chosen is None else chosen.logprobs[:, 0].tolist()
    return Sampled(output.request_id, output.new_token_ids, logprobs, output.finish_reason is not None)


def _check_heads(head_dim: int, path: Path) -> None:
    """On CPU vLLM finds this out at the first request, and dies of it."""
    known = CPUAttentionBackend.get_supported_head_sizes()
    if current_platform.is_cpu() and head_dim not in known:
        raise ModelError(
            f"vLLM's CPU attention knows heads of {', '.join(map(str, known))} dimensions, {path} has {head_dim}; use "
            "the torch engine, or a model with such heads"
        )


def _arguments(settings: CoreSettings) -> AsyncEngineArgs:
    return AsyncEngineArgs(
        model=str(settings.model_path),
        skip_tokenizer_init=True,
        dtype=settings.dtype,
        seed=settings.seed,
        max_model_len=settings.context_length,
        max_num_seqs=settings.slots,
        tensor_parallel_size=settings.devices,
        kv_cache_memory_bytes=settings.cache_bytes,
        enable_prefix_caching=True,
        generation_config="vllm",  # a request says how it samples, the model's directory does not
        logprobs_mode="processed_logprobs",  # of the distribution sampled from
        async_scheduling=False,  # a step's outputs are named as it ends
        enforce_eager=current_platform.is_cpu(),  # compiling takes a C++ compiler and half a minute
        worker_extension_cls="pipelinerl.engines.vllm_worker.StagedWeights",
        disable_log_stats=True,
    )
