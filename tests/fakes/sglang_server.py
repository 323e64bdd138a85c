"""A verified fake of SGLang's server: its routes, request types and errors, with a Hugging Face model behind them.

Written from the sources of SGLang 0.5.19 to 0.5.23: `io_struct.py` (request types), `http_server.py` (routes and
statuses), `weight_updater.py` (update sessions, since 0.5.21), `weight_versions.py` (the weights of each token,
reported at the end of a sample), `init_custom_process_group` (how a server's rank joins). Unlike SGLang it rejects
unknown fields, has one rank, and recomputes every sample at each step, so that no cache outlives an update.
`test_stock_servers` verifies it.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from torch.distributed import distributed_c10d as c10d

from pipelinerl import rng


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class SamplingParams(Closed):
    temperature: float = Field(default=1.0, ge=0.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, ge=-1)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=2.0)
    min_new_tokens: int = Field(default=0, ge=0)
    max_new_tokens: int = Field(default=128, ge=0)
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    sampling_seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None


class GenerateReqInput(Closed):
    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    return_logprob: bool = False
    stream: bool = False
    cache_salt: str | None = None


class PauseGenerationReqInput(Closed):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueGenerationReqInput(Closed):
    torch_empty_cache: bool = True


class InitWeightsUpdateGroupReqInput(Closed):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DestroyWeightsUpdateGroupReqInput(Closed):
    group_name: str = "weight_update_group"


class BeginWeightUpdateReqInput(Closed):
    selector: Literal["target", "draft", "all"] = "all"


class EndWeightUpdateReqInput(Closed):
    pass


class UpdateWeightsFromDistributedReqInput(Closed):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None


class UpdateWeightVersionReqInput(Closed):
    new_version: str
    abort_all_requests: bool = True


def _kept(logprobs: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Return log-probs [V] with -inf for the tokens that top-k, top-p and min-p drop; the others stay as they are."""
    ordered, order = logprobs.sort(descending=True, stable=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    dropped = (before > params.top_p) | (ordered.exp() < ordered[0].exp() * params.min_p)
    if params.top_k > 0:
        dropped[params.top_k :] = True
    return logprobs.index_fill(0, order[dropped], -torch.inf)


@dataclass
class Sample:
    """A sample in progress, like `Req` in SGLang's scheduler."""

    parameters: GenerateReqInput
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    changes: list[tuple[str, int]] = field(default_factory=list)  # (version, token index) of each weight change
    finished: dict[str, Any] | None = None
    events: asyncio.Queue[dict[str, Any]] = field(default_factory=asyncio.Queue)

    def event(self, version: str) -> dict[str, Any]:
        """Return the event streamed after a step: all tokens so far, and after the last step the version spans."""
        meta: dict[str, Any] = {
            "id": self.parameters.rid,
            "finish_reason": self.finished,
            "prompt_tokens": len(self.parameters.input_ids),
            "completion_tokens": len(self.tokens),
            "weight_version": version,
            "output_token_logprobs": [[lp, t, None] for lp, t in zip(self.logprobs, self.tokens, strict=True)],
        }
        if self.finished is not None:
            meta["weight_versions"] = self._spans(version)
        return {"text": "", "output_ids": list(self.tokens), "meta_info": meta, "index": 0}

    def _spans(self, version: str) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for name, end in [*self.changes, (version, len(self.tokens))]:
            start = spans[-1]["end"] if spans else 0
            if not spans or end > start:
                spans.append({"version": name, "start": start, "end": end})
        return spans


class SglangServer:
    """The state of one server, and the loop of its scheduler."""

    def __init__(self, model: Any, *, context_length: int, deterministic: bool = True) -> None:
        self.model = model.eval()
        self.context_length = context_length
        self.info = {
            "tp_size": 1, "pp_size": 1, "dp_size": 1, "dtype": str(model.dtype).removeprefix("torch."),
            "enable_deterministic_inference": deterministic, "incremental_streaming_output": False,
            "version": "0.5.23", "preferred_sampling_params": None,
        }  # fmt: skip
        self.reports_original = False  # as with SGLANG_RETURN_ORIGINAL_LOGPROB in the environment
        self.salts: list[str | None] = []
        self.session_open = False
        self.version = "default"
        self.running: dict[str, Sample] = {}
        self.retracted = False
        self.groups: dict[str, Any] = {}
        self.continued = asyncio.Event()
        self.work = asyncio.Event()
        self.silent = False  # if true, the server hangs: connections get no answer, and sampling stops
        self.step_ended = asyncio.Lock()  # held during a step or an update, so that they never overlap
        self._group_guard = threading.Lock()

    # --- the scheduler -------------------------------------------------------------------------------------------

    async def steps(self) -> None:
        while True:
            await self.continued.wait()
            await self.work.wait()
            async with self.step_ended:
                samples = [] if self.silent else list(self.running.values())
                if self.continued.is_set() and samples:
                    await asyncio.to_thread(self._step, samples)
                    for sample in samples:
                        self._tell(sample)
            if self.silent or not self.running:
                self.work.clear()

    def _step(self, samples: list[Sample]) -> None:
        rows = [sample.parameters.input_ids + sample.tokens for sample in samples]
        longest = max(map(len, rows))
        with torch.inference_mode():
            logits = self.model(torch.tensor([row + [0] * (longest - len(row)) for row in rows])).logits.float()
        for index, (sample, row) in enumerate(zip(samples, rows, strict=True)):
            self._sample(sample, logits[index, len(row) - 1])

    def _sample(self, sample: Sample, logits: torch.Tensor) -> None:
        params = sample.parameters.sampling_params
        logprobs = torch.log_softmax(logits / (params.temperature or 1.0), -1)
        position = len(sample.parameters.input_ids) + len(sample.tokens)
        noise = rng.generator(params.sampling_seed or 0, "fake sglang", position).gumbel(size=len(logits))
        kept = _kept(logprobs, params) if params.temperature else logprobs
        token = int((kept + (torch.from_numpy(noise) if params.temperature else 0)).argmax())
        sample.tokens.append(token)
        reported = torch.log_softmax(logits, -1) if self.reports_original else logprobs
        sample.logprobs.append(float(reported[token]))
        if not params.ignore_eos and token in (params.stop_token_ids or ()):
            sample.finished = {"type": "stop", "matched": token}
        elif len(sample.tokens) >= params.max_new_tokens:
            sample.finished = {"type": "length", "length": params.max_new_tokens}

    def _tell(self, sample: Sample) -> None:
        sample.events.put_nowait(sample.event(self.version))
        if sample.finished is not None:
            self.running.pop(sample.parameters.rid, None)

    def abort_all(self) -> None:
        for sample in list(self.running.values()):
            sample.finished = {"type": "abort", "message": "Abort in waiting queue or running batch"}
            self._tell(sample)

    # --- the routes ----------------------------------------------------------------------------------------------

    async def generate(self, parameters: GenerateReqInput, request: Request) -> Response:
        if not parameters.stream or not parameters.input_ids:
            raise HTTPException(400, "this fake streams, and input_ids cannot be empty")
        given = parameters.sampling_params.model_dump(exclude_unset=True)
        merged = SamplingParams(**(self.info["preferred_sampling_params"] or {}) | given)
        parameters = parameters.model_copy(update={"sampling_params": merged})
        if len(parameters.input_ids) + parameters.sampling_params.max_new_tokens > self.context_length:
            raise HTTPException(400, "The requested tokens exceed the model's context length")
        self.salts.append(parameters.cache_salt)
        if parameters.rid in self.running:
            raise HTTPException(400, f"Duplicate request ID detected: {parameters.rid}")
        return StreamingResponse(self._streamed(Sample(parameters)), media_type="text/event-stream")

    async def _streamed(self, sample: Sample) -> AsyncIterator[str]:
        await self.continued.wait()  # a paused server starts no sample, as with `is_pause_cond` in SGLang
        self.running[sample.parameters.rid] = sample
        self.work.set()
        try:
            event: dict[str, Any] = {"meta_info": {"finish_reason": None}}
            while event["meta_info"]["finish_reason"] is None:
                event = await sample.events.get()
                yield f"data: {json.dumps(event)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            # A disconnect aborts the sample, as `create_abort_task` in SGLang does.
            self.running.pop(sample.parameters.rid, None)

    async def pause(self, parameters: PauseGenerationReqInput) -> dict[str, str]:
        self.continued.clear()
        async with self.step_ended:
            if parameters.mode == "abort":
                self.abort_all()
            self.retracted = parameters.mode == "retract"
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def go_on(self, _: ContinueGenerationReqInput) -> dict[str, str]:
        self.continued.set()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def flush(self) -> Response:
        done = self.retracted or not self.running
        return PlainTextResponse("Cache flushed.\n" if done else "Flush cache failed.\n", 200 if done else 400)

    async def join(self, parameters: InitWeightsUpdateGroupReqInput) -> Response:
        try:
            group = await asyncio.to_thread(self._joined, parameters)
        except (RuntimeError, ValueError) as error:
            return _said(False, f"Failed to initialize custom process group: {error}.")
        self.groups[parameters.group_name] = group
        return _said(True, "Succeeded to initialize custom process group.")

    def _joined(self, parameters: InitWeightsUpdateGroupReqInput) -> Any:
        patience = timedelta(seconds=30)
        with self._group_guard:
            meeting = c10d.rendezvous(
                f"tcp://{parameters.master_address}:{parameters.master_port}",
                parameters.rank_offset,
                parameters.world_size,
                timeout=patience,
            )
            store, rank, world_size = next(meeting)
            store.set_timeout(patience)
            group, _ = c10d._new_process_group_helper(
                world_size, rank, [], c10d.Backend(parameters.backend), c10d.PrefixStore(parameters.group_name, store),
                group_name=c10d.GroupName(parameters.group_name), backend_options=None, timeout=patience,
            )  # fmt: skip
            c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        return group

    async def leave(self, parameters: DestroyWeightsUpdateGroupReqInput) -> Response:
        group = self.groups.pop(parameters.group_name, None)
        if group is None:
            return _said(False, "The group to be destroyed does not exist.")
        dist.destroy_process_group(group)
        return _said(True, "Succeeded to destroy custom process group.")

    @property
    def _has_sessions(self) -> bool:
        return [int(part) for part in self.info["version"].split(".")[:3]] >= [0, 5, 21]

    async def begin(self, _: BeginWeightUpdateReqInput) -> Response:
        return await self._session(True, "a weight-update session is already open; call end_weight_update() first")

    async def end(self, _: EndWeightUpdateReqInput) -> Response:
        return await self._session(False, "no weight-update session is open; call begin_weight_update() first")

    async def _session(self, opens: bool, otherwise: str) -> Response:
        if not self._has_sessions:
            raise HTTPException(404, "Not Found")
        await self._unless_sampling()
        if self.session_open is opens:
            return _said(False, otherwise)
        self.session_open = opens
        return _said(True, "Success")

    async def _unless_sampling(self) -> None:
        while self.continued.is_set() and self.running:  # wait for running samples, like SGLang's writer lock
            await asyncio.sleep(0.01)

    async def update(self, parameters: UpdateWeightsFromDistributedReqInput) -> Response:
        if self._has_sessions and not self.session_open:
            return _said(
                False, "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )
        if parameters.group_name not in self.groups:
            return _said(
                False,
                f"Group {parameters.group_name} not in {list(self.groups)}. "
                "Please call `init_weights_update_group` first.",
            )
        await self._unless_sampling()
        async with self.step_ended:
            try:
                await asyncio.to_thread(self._received, parameters)
            except (RuntimeError, KeyError) as error:
                return _said(False, f"Failed to update parameter online: {error}.")
            if parameters.flush_cache and self.running and not self.retracted:
                raise HTTPException(500, "Cache flush failed after updating weights")
            if parameters.weight_version is not None:
                self._name(parameters.weight_version)
        return _said(True, "Succeeded to update parameter online.")

    def _received(self, parameters: UpdateWeightsFromDistributedReqInput) -> None:
        group, named = self.groups[parameters.group_name], dict(self.model.named_parameters())
        received = []
        for name, dtype, shape in zip(parameters.names, parameters.dtypes, parameters.shapes, strict=True):
            values = torch.empty(shape, dtype=getattr(torch, dtype))
            received.append((name, values, dist.broadcast(values, src=0, group=group, async_op=True)))
        with torch.no_grad():
            for name, values, work in received:
                assert work is not None
                work.wait()
                named[name].copy_(values)

    async def name(self, parameters: UpdateWeightVersionReqInput) -> dict[str, Any]:
        if parameters.abort_all_requests:
            self.abort_all()
        self._name(parameters.new_version)
        return {
            "success": True,
            "message": f"Weight version updated to {parameters.new_version}",
            "new_version": self.version,
        }

    def _name(self, version: str) -> None:
        for sample in self.running.values():
            if sample.tokens:
                sample.changes.append((self.version, len(sample.tokens)))
        self.version = version


def _said(success: bool, message: str) -> Response:
    return JSONResponse({"success": success, "message": message}, 200 if success else 400)


def create_app(server: SglangServer) -> Any:
    app = _routed(server)

    async def unless_silent(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and server.silent:
            await asyncio.Event().wait()
        await app(scope, receive, send)

    return unless_silent


def _routed(server: SglangServer) -> FastAPI:

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        server.continued.set()
        scheduler = asyncio.create_task(server.steps())
        yield
        scheduler.cancel()

    app = FastAPI(lifespan=life)
    posts = {
        "/generate": server.generate,
        "/pause_generation": server.pause,
        "/continue_generation": server.go_on,
        "/flush_cache": server.flush,
        "/init_weights_update_group": server.join,
        "/destroy_weights_update_group": server.leave,
        "/begin_weight_update": server.begin,
        "/end_weight_update": server.end,
        "/update_weights_from_distributed": server.update,
        "/update_weight_version": server.name,
    }
    for path, route in posts.items():
        app.post(path, response_model=None)(route)
    app.get("/health")(lambda: None)
    app.get("/server_info")(lambda: server.info)
    app.get("/v1/models")(lambda: {"object": "list", "data": [{"id": "m", "max_model_len": server.context_length}]})
    return app
