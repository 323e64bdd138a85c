"""`VllmCore`: an `EngineCore` over vLLM's engine core, for one release series of vLLM; no other file uses that core.

vLLM's `AsyncLLM` is a client of the same core, but reports only at a sample's end which weights sampled which tokens.
This engine delivers every token with its version as soon as it is sampled.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Final, Self

from pydantic import ValidationError
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient
from vllm.v1.executor import Executor
from vllm.v1.structured_output.backend_xgrammar import validate_xgrammar_grammar

from inference_contract.errors import InvalidRequest
from inference_contract.weights import DType, OnUpdate, WeightLayout
from pipelinerl.engines.batching.model_runner import top_tokens
from pipelinerl.engines.batching.sample_loop import UNTRAINED
from pipelinerl.engines.batching.sequence import Request, Sequence, TopTokens
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.weights.torch_shared_bytes import SharedBytes
from pipelinerl.engines.weights.worker_endpoint import WorkerEndpointFactory
from pipelinerl.errors import ModelError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.external_engines.core_loop import Sampled, Step, label_of, named_by, refuse_beyond, sample_id
from pipelinerl.plugins.external_engines.vllm.limits import (
    BACKEND,
    COPY_POLL_S,
    EXTENSION,
    check_continued,
    check_request,
    sampling_of,
    share_without_copy,
    structure_of,
)

log = logging.getLogger("pipelinerl")

#: Seconds that the core's process has to end before it is killed; it has no state that must be saved.
_CORE_ENDS_S: Final = 1.0

#: The most tokens that vLLM processes in one step on a CPU, unless `context_length` is larger.
_CPU_STEP: Final = 4096

#: The sampling fields that are supported besides temperature, top-k and top-p.
_OFFERED: Final = frozenset(
    {"min_p", "top_logprobs", "logit_bias", "frequency_penalty", "presence_penalty", "response_format"}
)
#: vLLM's preferred library for structured output.
_GRAMMARS: Final = "xgrammar"

_PAUSES: Final = {
    OnUpdate.CONTINUE: "keep",
    OnUpdate.RECOMPUTE_KV: "keep",
    OnUpdate.ABORT: "abort",
    OnUpdate.DRAIN: "wait",
}


class VllmCore:
    """A running vLLM core; satisfies `EngineCore`. If its process died, all but `close` raise `EngineDeadError`."""

    def __init__(self, client: Any, staged: Any, endpoints: WorkerEndpointFactory) -> None:
        self._client = client
        self._endpoints = endpoints
        self.staged = staged
        self.cache_bytes = 0
        self._commits = 0
        self._spells_json = False
        self._unanswered = set[asyncio.Future[None]]()

    @classmethod
    async def start(
        cls,
        options: EngineOptions,
        layout: WeightLayout,
        endpoints: WorkerEndpointFactory,
        *,
        cache_bytes: int | None = None,
    ) -> Self:
        """Start the core's process, which loads the model, and connect to its worker; blocks the event loop.

        Through `endpoints`, the worker takes part in the weight group, the process group over which weights arrive.
        `layout` describes the weights that the core loads; behind them, the shared memory has room for an update in
        another dtype. `cache_bytes` is the memory for keys and values; None lets vLLM measure the device's free memory.
        Raises `ModelError` if vLLM cannot serve this model here.
        """
        if options.device not in ("auto", current_platform.device_type):
            raise ModelError(
                f"the installed vLLM runs on {current_platform.device_type}, the recipe sets {options.device}; "
                "install the other build, or set engine.device=auto"
            )
        may_copy = True
        if current_platform.is_cuda_alike():
            total, default = current_platform.get_device_total_memory(), AsyncEngineArgs.gpu_memory_utilization
            share, may_copy = share_without_copy(options.memory_share, total, layout.num_bytes, default=default)
            options = replace(options, memory_share=share)
        try:
            config = _arguments(options, cache_bytes).create_engine_config()
            _check_heads(config.model_config.get_head_size(), options.model_path)
            client = EngineCoreClient.make_async_mp_client(config, Executor.get_class(config), log_stats=False)
        except (ValueError, TypeError, RuntimeError, OSError) as error:
            raise ModelError(f"vLLM cannot serve {options.model_path}: {_sentence(error)}") from error
        assert isinstance(client, AsyncMPClient)
        widest = sum(prod(parameter.shape) for parameter in layout.parameters) * DType.FLOAT32.itemsize
        with SharedBytes(layout.num_bytes, further=widest) as staged, endpoints.accept_worker() as socket_path:
            core = cls(client, staged.tensor, endpoints)
            endpoints.lend(staged)
            shared: dict[str, Any] = {"path": str(staged.path), "num_bytes": layout.num_bytes + widest}
            shared |= {"layout": layout.model_dump_json(), "may_copy": may_copy}
            await core._in_workers("init_weight_transfer_engine", shared)
            workers = await core._in_workers("pipelinerl_attach", os.getpid(), str(socket_path))
        core.cache_bytes = sum(size for size, _ in workers)
        log.info("weight updates load from %s", workers[0][1])
        core._spells_json = _spells_json(options.model_path)
        await client.set_weight_version_async(label_of(*UNTRAINED))
        return core

    async def close(self) -> None:
        """End the core's process; blocks the event loop until it has ended."""
        self._endpoints.close()
        self._client.shutdown(timeout=_CORE_ENDS_S)

    # --- samples -------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise `InvalidRequest` for values that vLLM would silently replace, and for features that it lacks."""
        check_request(request)
        check_continued(request)
        refuse_beyond(request, _OFFERED, "this engine")
        if request.response_format is not None:
            if not self._spells_json:
                raise InvalidRequest(
                    "response_format: the vocabulary of this model cannot spell JSON; leave it out",
                    param="response_format",
                )
            try:  # the core would hide the error of a schema that vLLM's grammars do not support
                validate_xgrammar_grammar(SamplingParams(structured_outputs=_grammar_of(request)))
            except (VLLMValidationError, ValueError) as error:
                raise InvalidRequest(f"response_format: {_sentence(error)}", param="response_format") from error

    async def add(self, sequences: list[Sequence], *, salt: str) -> None:
        """Begin all samples of one request in the same step, so that a request alone on the engine is reproducible."""
        requests = [self._client.add_request_async(_order(each, salt)) for each in sequences]
        if len(requests) > 1:
            # The core handles calls in order, so a pause and a resume after the requests make all samples begin in the
            # same step. The core answers the pause only when it has no samples left; waiting for that here would
            # serialise requests.
            pausing = asyncio.ensure_future(self.pause(OnUpdate.CONTINUE))
            self._unanswered.add(pausing)
            pausing.add_done_callback(self._answered)
            requests.append(self.resume())
        await asyncio.gather(*requests)

    def _answered(self, pausing: asyncio.Future[None]) -> None:
        self._unanswered.discard(pausing)
        if not pausing.cancelled():
            pausing.exception()  # mark the exception as retrieved; `next_step` reports a dead core

    async def abort(self, sample_ids: list[str]) -> None:
        await self._client.abort_requests_async(sample_ids)

    async def next_step(self) -> Step:
        outputs = await self._client.get_output_async()
        label = outputs.weight_version
        return Step(None if label is None else named_by(label), [_sampled(output) for output in outputs.outputs])

    # --- weights -------------------------------------------------------------------------------------------------

    async def pause(self, on_update: OnUpdate) -> None:
        await self._client.pause_scheduler_async(mode=_PAUSES[on_update], clear_cache=False)

    async def resume(self) -> None:
        await self._client.resume_scheduler_async()

    async def stage(self) -> None:
        """Have every worker copy the staged weights to its GPU, where they fit, while the core samples."""
        self._commits += 1
        while not all(each["staged"] for each in await self._in_workers("pipelinerl_stage", self._commits)):
            await asyncio.sleep(COPY_POLL_S)

    async def load_staged(self, epoch: int, version: int) -> None:
        """Have every worker load the staged weights, which sample from the next step on; the core must be paused."""
        await self._in_workers("start_weight_update")
        await self._in_workers("update_weights", {})
        await self._in_workers("finish_weight_update")
        await self._client.set_weight_version_async(label_of(epoch, version))

    async def forget_cache(self) -> None:
        await self._client.reset_prefix_cache_async(reset_running_requests=True)

    async def _in_workers(self, method: str, *arguments: Any) -> list[Any]:
        results: list[Any] = await self._client.collective_rpc_async(method, None, arguments)
        return results


def _sampled(output: EngineCoreOutput) -> Sampled:
    chosen = output.new_logprobs
    logprobs = [] if chosen is None else chosen.logprobs[:, 0].tolist()
    tokens = output.new_token_ids
    top: list[TopTokens] = []
    # Column 0 is the sampled token, the others are the likeliest tokens.
    if chosen is not None and chosen.logprobs.shape[1] > 1:
        top = [
            top_tokens(row_ids[1:], row[1:], len(row))
            for row_ids, row in zip(chosen.logprob_token_ids, chosen.logprobs, strict=True)
        ]
    return Sampled(output.request_id, tokens, logprobs, len(tokens), output.finish_reason is not None, top)


def _order(sequence: Sequence, salt: str) -> EngineCoreRequest:
    request = sequence.request
    params = SamplingParams(
        **sampling_of(sequence),
        structured_outputs=_grammar_of(request),
        output_kind=RequestOutputKind.DELTA,
        watermarking=False,
    )
    return EngineCoreRequest(
        request_id=sample_id(sequence),
        prompt_token_ids=sequence.context,
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=salt,
        data_parallel_rank=None,
        priority=request.priority,
    )


def _grammar_of(request: Request) -> StructuredOutputsParams | None:
    if request.response_format is None:
        return None
    grammar = StructuredOutputsParams(**structure_of(request)["structured_outputs"])
    grammar._backend = _GRAMMARS  # vLLM's own request processor, unused here, would set this field
    return grammar


def _spells_json(path: Path) -> bool:
    """Return whether the tokenizer has tokens that spell JSON; without them, a grammar leaves no token to sample."""
    text = '{"a":[1,true]}'
    tokenizer = ChatTokenizer.load(path)
    try:
        return tokenizer.decode(tokenizer.encode(text)).replace(" ", "") == text
    except ModelError:
        return False


def _check_heads(head_dim: int, path: Path) -> None:
    """Raise `ModelError` for an unsupported head size: on CPU, vLLM would crash at the first request."""
    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    known = CPUAttentionBackend.get_supported_head_sizes()
    if head_dim not in known:
        raise ModelError(
            f"vLLM's CPU attention supports heads of {', '.join(map(str, known))} dimensions, {path} has {head_dim}; "
            "use the torch engine, or a model with such heads"
        )


def _arguments(options: EngineOptions, cache_bytes: int | None = None) -> AsyncEngineArgs:
    share = {} if options.memory_share is None else {"gpu_memory_utilization": options.memory_share}
    ours = partial(
        AsyncEngineArgs,
        model=str(options.model_path),
        skip_tokenizer_init=False,  # structured output needs the tokenizer
        structured_outputs_config={"backend": _GRAMMARS},
        dtype=options.dtype,
        seed=options.seed % 2**31,
        max_model_len=options.context_length,
        max_num_seqs=options.slots,
        # On CPU, vLLM crashes if it splits a prompt, because CPU generators cannot be rewound.
        enable_chunked_prefill=not current_platform.is_cpu(),
        max_num_batched_tokens=max(options.context_length, _CPU_STEP) if current_platform.is_cpu() else None,
        tensor_parallel_size=options.devices,
        kv_cache_memory_bytes=cache_bytes,
        enable_prefix_caching=True,
        scheduling_policy="priority",
        generation_config="vllm",  # ignore the model's own sampling defaults
        logprobs_mode="processed_logprobs",  # report log-probs of the distribution sampled from
        async_scheduling=False,  # each step's outputs must carry the version of the weights
        enforce_eager=current_platform.is_cpu(),  # on a CPU, compiling needs a C++ compiler and half a minute
        worker_extension_cls=EXTENSION,
        weight_transfer_config={"backend": BACKEND},
        disable_log_stats=True,
    )
    return ours(**{**share, **options.options})


def _sentence(error: Exception) -> str:
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
    return str(error).partition("\n")[0]
