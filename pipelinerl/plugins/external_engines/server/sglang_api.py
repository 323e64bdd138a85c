"""`SglangServerApi`: the client of a stock SGLang server, over its native `/generate` and weight-update routes.

    python -m sglang.launch_server --model-path MODEL --enable-deterministic-inference

Weights are sent the way SGLang's users send them: this process is rank 0 of a group that the server's ranks join, and
broadcasts the staged parameters one after another. The group uses gloo, whatever device the server runs on, so this
process needs no GPU.

SGLang reports which weights sampled each token since 0.5.19. Since 0.5.21 it accepts weights only in a session, from
`/begin_weight_update` to `/end_weight_update`.

This client is written from the request types of SGLang 0.5.19 to 0.5.23 and tested against a fake server made from the
same types. It has not been run against a real server.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

from inference_contract.errors import InvalidRequest
from inference_contract.weights import OnUpdate, WeightLayout
from pipelinerl.engines.batching.sequence import Request, Sequence
from pipelinerl.engines.weights.torch_shared_bytes import SharedBytes
from pipelinerl.errors import EngineUnreachable, ModelError
from pipelinerl.plugins.external_engines.core_loop import refuse_beyond, sample_id
from pipelinerl.plugins.external_engines.server.server_core import Chunk, LabelSpan, ServerHttp, release_of
from pipelinerl.system.background import in_background
from pipelinerl.system.machine import address_towards

_PAUSES: Final = {
    OnUpdate.CONTINUE: "in_place",
    OnUpdate.RECOMPUTE_KV: "retract",
    OnUpdate.ABORT: "abort",
    OnUpdate.DRAIN: "in_place",  # no sample is running after a drain, so any mode will do
}
#: The first release that reports which weights sampled which tokens.
_FIRST: Final = (0, 5, 19)
#: The first release that accepts weights only in an update session.
_SESSIONS: Final = (0, 5, 21)
#: Sampling parameters that are not supported, with their neutral values: a server started with
#: `--preferred-sampling-params` uses its own value for each that a request leaves out.
_NEUTRAL: Final = {
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
#: Settings with which a server computes something else than the trainer, or does not load all of an update; each with
#: the accepted values and the flag to leave out.
_SILENT: Final[Mapping[str, tuple[tuple[object, ...], str]]] = {
    "quantization": ((None, "unquant"), "--quantization"),
    "torchao_config": ((None, ""), "--torchao-config"),
    "kv_cache_dtype": ((None, "auto"), "--kv-cache-dtype"),
    "speculative_algorithm": ((None,), "--speculative-algorithm"),
    "enable_lora": ((None, False), "--enable-lora"),
    "lora_paths": ((None, [], {}), "--lora-paths"),
    "json_model_override_args": ((None, "", "{}"), "--json-model-override-args"),
    "cpu_offload_gb": ((None, 0), "--cpu-offload-gb"),
}
#: A temperature at which all tokens are nearly equally likely, and the largest spread of their log-probs then, in nats.
_HOT: Final = 1000.0
_HOT_SPREAD: Final = 0.5
_LONG_S: Final = 600.0
_JOIN_S: Final = 60.0


class SglangServerApi:
    """Client of a stock SGLang server; satisfies `ServerApi`."""

    generate = "/generate"

    def __init__(self, http: ServerHttp, layout: WeightLayout, staged: SharedBytes) -> None:
        self._http = http
        self._layout = layout
        self._staged = staged.tensor
        self._ranks = 0
        self._has_sessions = True
        self._group: tuple[str, Any] | None = None  # the name and the collective of the weight group
        self._retracted = False

    async def open(self, label: str) -> tuple[str, int]:
        """Check the server, form the group, label the weights; return dtype and context length. Raises `ModelError`."""
        info = await self._http.get("/server_info")
        release = release_of(str(info.get("version")))
        if release < _FIRST:
            raise ModelError(
                f"the SGLang server at {self._http.url} must be of version 0.5.19 or later, got {info.get('version')}: "
                "earlier ones do not report which weights sampled which tokens; install a later one"
            )
        self._has_sessions = release >= _SESSIONS
        if preferred := info.get("preferred_sampling_params"):
            raise ModelError(
                f"the SGLang server at {self._http.url} would add its preferred_sampling_params {preferred} to "
                "requests; start it without --preferred-sampling-params"
            )
        for name, (accepted, flag) in _SILENT.items():
            if (value := info.get(name)) not in accepted:
                raise ModelError(
                    f"the SGLang server at {self._http.url} has {name} = {value!r}, with which its log-probs differ "
                    f"from the trainer's or updates miss some weights; start it without {flag}"
                )
        if info["dp_size"] != 1 or info["pp_size"] != 1:
            raise ModelError(
                f"the SGLang server at {self._http.url} must have dp_size and pp_size 1, got {info['dp_size']} and "
                f"{info['pp_size']}; start one server for each replica"
            )
        if not info["enable_deterministic_inference"]:
            raise ModelError(
                f"the SGLang server at {self._http.url} ignores the seeds of requests; start it with "
                "--enable-deterministic-inference"
            )
        self._ranks = int(info["tp_size"])
        # End the update session and the pause that an earlier client may have left: either would block this one. The
        # session ends first, because without a pause SGLang would wait for running samples.
        await self._end_session()
        await self.resume()
        await self._reports_the_policy()
        await self._form_group()
        await self._succeeds("/update_weight_version", {"new_version": label, "abort_all_requests": False})
        models = await self._http.get("/v1/models")
        return str(info["dtype"]), int(models["data"][0]["max_model_len"])

    async def _reports_the_policy(self) -> None:
        """Check that log-probs are those at the temperature: at a high one, all tokens are about equally likely."""
        hot = {**_NEUTRAL, "temperature": _HOT, "top_p": 1.0, "top_k": -1, "max_new_tokens": 16, "ignore_eos": True}
        probe = {"rid": f"probe-{time.time_ns()}", "input_ids": [0], "stream": True, "return_logprob": True}
        logprobs: list[float] = []
        async for event in self._http.events(self.generate, probe | {"sampling_params": hot}):
            logprobs += self.read(event, known=len(logprobs)).logprobs
        spread = max(logprobs) - min(logprobs)
        if spread > _HOT_SPREAD:
            raise ModelError(
                f"the SGLang server at {self._http.url} reports log-probs from before the temperature: at temperature "
                f"{_HOT:g} they differ by {spread:.2g} nats; start it without SGLANG_RETURN_ORIGINAL_LOGPROB"
            )

    async def close(self) -> None:
        """Leave the weight group, and resume the server if it is paused."""
        group, self._group = self._group, None
        if group is not None:
            name, collective = group
            collective.close()
            await self._http.post("/destroy_weights_update_group", {"group_name": name})
        await self.resume()

    # --- samples -------------------------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise `InvalidRequest` for log-probs after top-k or top-p: SGLang reports those from before truncation."""
        refuse_beyond(request, frozenset({"policy_logprobs"}), "this engine's server")
        if request.truncates and not request.policy_logprobs:
            raise InvalidRequest(
                "this engine's server reports log-probs of the distribution before top-k and top-p; set "
                "policy_logprobs=true, or top_k=0 and top_p=1",
                param="top_k" if request.top_k else "top_p",
            )

    def order(self, sequence: Sequence, *, salt: str) -> Mapping[str, Any]:
        """Return the `GenerateReqInput` of one sample, which ends only at the token limit or at `stop_ids`."""
        request = sequence.request
        return {
            "rid": sample_id(sequence),
            "input_ids": sequence.context,
            "stream": True,
            "return_logprob": True,
            "cache_salt": salt,
            "sampling_params": {
                **_NEUTRAL,
                "temperature": request.temperature,
                "top_p": request.top_p,
                "top_k": request.top_k or -1,
                "max_new_tokens": sequence.token_limit,
                "stop_token_ids": sorted(request.stop_ids),
                "ignore_eos": not request.stop_ids,  # without stop ids, SGLang must ignore all end tokens
                # SGLang hashes the seed with a token's position in the sequence, so a prefix does not change the noise.
                "sampling_seed": sequence.noise_key % 2**31,
                "skip_special_tokens": False,
            },
        }

    def read(self, event: Mapping[str, Any], *, known: int) -> Chunk:
        """Return an event's new tokens, the last of its list, which may repeat the `known` ones of earlier events."""
        if "error" in event:
            raise EngineUnreachable(f"the SGLang server at {self._http.url} aborted a sample: {event['error']}")
        meta = event["meta_info"]
        new = int(meta["completion_tokens"]) - known
        logprobs = meta.get("output_token_logprobs") or []
        if new and len(logprobs) < new:
            raise EngineUnreachable(f"expected {new} log-probs with as many new tokens, got {len(logprobs)}")
        fresh = logprobs[len(logprobs) - new :]
        return Chunk(
            [token_id for _, token_id, *_ in fresh],
            [logprob for logprob, *_ in fresh],
            ended=meta["finish_reason"] is not None,
            spans=[
                LabelSpan(span["version"], span["start"], span["end"])
                for span in meta.get("weight_versions") or ()
                if span["end"] > span["start"]
            ],
        )

    # --- weights -------------------------------------------------------------------------------------------------

    async def pause(self, on_update: OnUpdate) -> None:
        mode = _PAUSES[on_update]
        await self._http.post("/pause_generation", {"mode": mode}, timeout_s=_LONG_S)
        self._retracted = mode == "retract"

    async def resume(self) -> None:
        await self._http.post("/continue_generation", {"torch_empty_cache": False})

    async def stage(self) -> None:
        """Do nothing: SGLang receives weights only in a pause."""

    async def load_staged(self, label: str) -> None:
        """Broadcast the staged parameters to the server, in the order announced to it; name the new weights `label`."""
        if self._group is None:
            await self._form_group()  # a failed broadcast has left no usable group
        group = self._group
        assert group is not None
        name, collective = group
        specs = self._layout.parameters
        update = {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype.value for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": name,
            "flush_cache": False,
            "weight_version": label,
        }
        if self._has_sessions:
            await self._end_session()  # a failed update has left its session open
            await self._succeeds("/begin_weight_update", {})
        self._group = None  # a group whose broadcast fails is unusable
        sending = in_background("send-weights", lambda: self._send(collective))
        try:
            await self._succeeds("/update_weights_from_distributed", update)
            await asyncio.wrap_future(sending)
            if self._has_sessions:
                await self._succeeds("/end_weight_update", {})
            self._group = group
        finally:
            if self._group is None:
                collective.close()

    async def _end_session(self) -> None:
        """End an open update session. Ignore the error if none is open."""
        if self._has_sessions:
            with suppress(EngineUnreachable):
                await self._http.post("/end_weight_update", {}, timeout_s=_LONG_S, may_fail=True)

    def _send(self, collective: Any) -> None:
        from pipelinerl.engines.torch.weights import parameters_in

        deadline = time.monotonic() + _LONG_S
        for _, values in parameters_in(self._staged, self._layout):
            collective.broadcast(values, deadline=deadline)

    async def forget_cache(self) -> None:
        """Call `/flush_cache`, which SGLang obeys only after a pause that removed the samples from the batch."""
        if not self._retracted:
            raise EngineUnreachable("SGLang flushes its cache only after a pause of mode retract")
        await self._http.post("/flush_cache")

    async def _form_group(self) -> None:
        """Form a weight group under a new name, because SGLang keeps old groups until they are destroyed."""
        from pipelinerl.engines.weights.torch_endpoint import lead_group
        from pipelinerl.weights.broadcast.collective import Rendezvous

        name = f"pipelinerl-{os.getpid()}-{time.time_ns()}"
        server = urlsplit(self._http.url)
        meeting = Rendezvous(address_towards(server.hostname or "", server.port or 80))
        size = 1 + self._ranks
        join = {
            "master_address": meeting.host,
            "master_port": meeting.port,
            "rank_offset": 1,
            "world_size": size,
            "group_name": name,
            "backend": "gloo",
        }
        forming = in_background(
            "form-group", lambda: lead_group(meeting, name=name, world_size=size, timeout_s=_JOIN_S)
        )
        try:
            await self._succeeds("/init_weights_update_group", join)
            self._group = name, await asyncio.wrap_future(forming)
        finally:
            meeting.close()

    async def _succeeds(self, path: str, body: Mapping[str, Any]) -> None:
        answer = await self._http.post(path, body, timeout_s=_LONG_S)
        if not answer.get("success"):
            raise EngineUnreachable(f"POST {self._http.url}{path} must succeed, got: {answer.get('message')}")
