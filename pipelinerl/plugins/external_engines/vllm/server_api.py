"""`VllmServerApi`: the client of a stock `vllm serve`, over its RL routes and its token-in, token-out route.

    VLLM_SERVER_DEV_MODE=1 … vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs
        --scheduling-policy priority
        --worker-extension-cls pipelinerl.plugins.external_engines.vllm.transfer.SharedWeights
        --weight-transfer-config '{"backend": "pipelinerl"}'        and on a CPU: --no-enable-chunked-prefill

The pause, the update session and the version spans are vLLM's own. Only the transfer backend is this project's: vLLM
loads the class by name, and it reads the weights from memory that this process shares with the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from inference_contract.weights import OnUpdate, WeightLayout
from pipelinerl.engines.batching.sequence import Request, Sequence
from pipelinerl.engines.weights.torch_shared_bytes import SharedBytes
from pipelinerl.errors import EngineUnreachable, ModelError
from pipelinerl.plugins.external_engines.core_loop import refuse_beyond, sample_id
from pipelinerl.plugins.external_engines.server.server_core import Chunk, LabelSpan, ServerHttp, release_of
from pipelinerl.plugins.external_engines.vllm.limits import (
    BACKEND,
    COPY_POLL_S,
    EXTENSION,
    check_continued,
    check_request,
    sampling_of,
    structure_of,
)

#: The first release series with these routes, which is the one that the tests run.
_TESTED: Final = (0, 32)
_PROCESSED: Final = "--logprobs-mode processed_logprobs"

#: The sampling fields that are supported besides temperature, top-k and top-p. `top_logprobs` is missing, because the
#: route gives the likeliest tokens only as text.
_OFFERED: Final = frozenset({"min_p", "logit_bias", "frequency_penalty", "presence_penalty", "response_format"})

#: Settings with which a server computes something else than the trainer: section, name, accepted values and flag.
_SILENT: Final[tuple[tuple[str, str, tuple[object, ...], str], ...]] = (
    ("model_config", "quantization", (None,), "--quantization"),
    ("model_config", "logits_processors", (None, []), "--logits-processors"),
    ("cache_config", "cache_dtype", (None, "auto"), "--kv-cache-dtype"),
)

log = logging.getLogger("pipelinerl")

_PAUSES: Final = {
    OnUpdate.CONTINUE: "keep",
    OnUpdate.RECOMPUTE_KV: "keep",
    OnUpdate.ABORT: "abort",
    OnUpdate.DRAIN: "keep",  # no sample is running after a drain, so any mode will do
}
#: Timeout in seconds of slow calls: a pause waits for the current step, a load for the copy of all bytes.
_LONG_S: Final = 600.0


class VllmServerApi:
    """Client of a stock vLLM server; satisfies `ServerApi`."""

    generate = "/inference/v1/generate"

    def __init__(self, http: ServerHttp, layout: WeightLayout, staged: SharedBytes) -> None:
        self._http = http
        self._layout = layout
        self._staged = staged
        self._commits = 0
        self._orders = False  # True if the server schedules waiting requests by priority

    async def open(self, label: str) -> tuple[str, int]:
        """Check flags, share the staging memory, label the weights; return dtype and context. Raises `ModelError`."""
        version = str((await self._http.get("/version"))["version"])
        release = release_of(version)
        if release < _TESTED:
            raise ModelError(
                f"the vLLM server at {self._http.url} must be of version 0.32 or later, got {version}; install a later "
                "one"
            )
        if release[:2] != _TESTED:
            log.warning("the vLLM server at %s has version %s; not run with this version", self._http.url, version)
        try:
            config = (await self._http.get("/server_info?config_format=json"))["vllm_config"]
        except EngineUnreachable as error:
            raise ModelError(
                f"{error}; a vLLM server has its routes for RL only with VLLM_SERVER_DEV_MODE=1 in its environment"
            ) from error
        for wanted, flag in _lacking(config):
            raise ModelError(f"the vLLM server at {self._http.url} must {wanted}; start it with {flag}")
        # With another policy, the server accepts only priority 0.
        self._orders = config["scheduler_config"]["policy"] == "priority"
        # End the pause and the update session that an earlier client may have left: either would block this one.
        await self._http.post("/resume")
        await self._end_session(label)
        await self._tokens_go_in_and_out()
        share = {"path": str(self._staged.path), "layout": self._layout.model_dump_json()}
        await self._http.post("/init_weight_transfer_engine", {"init_info": share})
        await self._http.post("/update_weight_version", {"new_version": label})
        model = config["model_config"]
        return str(model["dtype"]).removeprefix("torch."), int(model["max_model_len"])

    async def close(self) -> None:
        """Release the shared memory, and end an open update session and a pause."""
        await self._end_session(None)
        try:
            await self._http.post("/shutdown_weight_transfer_engine")
        finally:
            await self._http.post("/resume")

    # --- samples -------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise `InvalidRequest` for temperatures that vLLM would replace, and for features that the route lacks."""
        check_request(request)
        check_continued(request)
        refuse_beyond(request, _OFFERED, "this engine's server")

    def order(self, sequence: Sequence, *, salt: str) -> Mapping[str, Any]:
        """Return one sample's `GenerateRequest`, up to its limit or `stop_ids`; equal `salt`s share cached prefixes."""
        request = sequence.request
        return {
            "request_id": sample_id(sequence),
            "token_ids": sequence.context,
            "stream": True,
            "cache_salt": salt,
            **({"priority": request.priority} if self._orders else {}),
            "sampling_params": {**sampling_of(sequence), "ignore_eos": True, **structure_of(request)},
        }

    def read(self, event: Mapping[str, Any], *, known: int) -> Chunk:
        """Return an event's new tokens; `known`, the number of earlier ones, is unused, since vLLM repeats none."""
        if "error" in event:
            raise EngineUnreachable(f"the vLLM server at {self._http.url} aborted a sample: {event['error']}")
        if not event["choices"]:
            return Chunk([], [], ended=False)
        choice = event["choices"][0]
        content = (choice["logprobs"] or {}).get("content") or []
        return Chunk(
            list(choice["token_ids"] or ()),
            [record["logprob"] for record in content],
            ended=choice["finish_reason"] is not None,
            spans=[LabelSpan(s["version"], s["start"], s["end"]) for s in choice.get("weight_versions") or ()],
        )

    # --- weights -------------------------------------------------------------------------------------------------

    async def pause(self, on_update: OnUpdate) -> None:
        """Call `/pause`, which takes at least 20 ms, because vLLM sleeps in it."""
        await self._http.post(f"/pause?mode={_PAUSES[on_update]}&clear_cache=false", timeout_s=_LONG_S)

    async def resume(self) -> None:
        await self._http.post("/resume")

    async def stage(self) -> None:
        """Have every worker copy the staged weights to its GPU, where they fit, while the server samples."""
        self._commits += 1
        call = {"method": "pipelinerl_stage", "args": [self._commits]}
        while not all(each["staged"] for each in (await self._http.post("/collective_rpc", call))["results"]):
            await asyncio.sleep(COPY_POLL_S)

    async def load_staged(self, label: str) -> None:
        """Load the staged weights in one update session of the server, which then reports them as version `label`."""
        await self._http.post("/start_weight_update")
        await self._http.post("/update_weights", {"update_info": {}}, timeout_s=_LONG_S)
        await self._http.post("/finish_weight_update", {"weight_version": label}, timeout_s=_LONG_S)

    async def _end_session(self, label: str | None) -> None:
        """End an open update session and name its weights `label`, unless None. Ignore the error if none is open."""
        named = {} if label is None else {"weight_version": label}
        with suppress(EngineUnreachable):
            await self._http.post("/finish_weight_update", named, timeout_s=_LONG_S, may_fail=True)

    async def forget_cache(self) -> None:
        """Call `/reset_prefix_cache`, which also drops the cache of running samples."""
        answer = await self._http.post("/reset_prefix_cache?reset_running_requests=true")
        if not answer["success"]:
            raise EngineUnreachable(f"the vLLM server at {self._http.url} did not reset its cache")

    # --- checks of the server's flags ----------------------------------------------------------------------------

    async def _tokens_go_in_and_out(self) -> None:
        """Check that the token route works and reports log-probs after top-k: with top_k=1 the log-prob is 0."""
        probe = {"token_ids": [0], "sampling_params": {"max_tokens": 1, "top_k": 1, "logprobs": 0, "detokenize": False}}
        try:
            answer = await self._http.post(self.generate, probe)
        except EngineUnreachable as error:
            raise ModelError(f"{error}; start the vLLM server with --enable-scale-out") from error
        logprob = answer["choices"][0]["logprobs"]["content"][0]["logprob"]
        if abs(logprob) > 1e-4:
            raise ModelError(
                f"the vLLM server at {self._http.url} must report log-probs of the distribution it samples from: with "
                f"top_k=1 expected 0, got {logprob:.4f}; start it with {_PROCESSED}"
            )


def _lacking(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    transfer = config["weight_transfer_config"]
    backend = transfer["backend"] if transfer else "none"
    if backend != BACKEND:
        flags = f"""--worker-extension-cls {EXTENSION} --weight-transfer-config '{{"backend": "{BACKEND}"}}'"""
        yield f"use the transfer backend {BACKEND}, it uses {backend}", flags
    mode = config["model_config"]["logprobs_mode"]
    if mode != "processed_logprobs":
        yield f"report log-probs of the distribution it samples from, it reports {mode}", _PROCESSED
    for section, name, accepted, flag in _SILENT:
        if (value := (config.get(section) or {}).get(name)) not in accepted:
            yield f"compute as the trainer does, it has {name} = {value!r}", f"no {flag}"
    for section in ("speculative_config", "lora_config"):
        if config.get(section):
            flag = f"no --{section.replace('_', '-')}".replace("lora-config", "enable-lora")
            yield f"compute as the trainer does, it has a {section}", flag
    if config["device_config"]["device"] == "cpu" and config["scheduler_config"]["enable_chunked_prefill"]:
        # After each part of a split prompt, vLLM rewinds the random generator, which is impossible on a CPU.
        yield "not split prompts on a CPU, where a seeded sample would then crash it", "--no-enable-chunked-prefill"
