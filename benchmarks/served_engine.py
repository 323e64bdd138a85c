"""Engines for benchmarks, and updates of their weights: `served` starts an engine in a process, `local` in this one.

No token ends a sample, so every answer has the length that its request asks for. With a `Load`, a served engine
generates requests on its own event loop, since a client would take part of a core. GET /notes returns the times at
which decode steps ended since the last GET, on the system's monotonic clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import JSONResponse

from benchmarks.processes import spawned
from inference_contract.schemas import ChatCompletion, ChatCompletionRequest
from inference_contract.weights import WeightLayout
from pipelinerl import registry
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.options import EngineOptions
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.warmstart.tiny_decoder import char_tokenizer
from pipelinerl.system.http_service import listen, serve
from pipelinerl.weights.publisher import Publication, Publisher, PublishReport, WeightSource
from trainer_contract.types import Device, WeightDType


@dataclass(frozen=True, slots=True)
class Load:
    """Endless requests for `samples` samples of `tokens` tokens each; while one runs, the next waits in the queue."""

    samples: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOrder:
    """An engine's settings. A served engine's process is pinned to `core` and uses only GPU number `gpu`, if given."""

    folder: Path
    slots: int
    context: int
    load: Load | None = None
    core: int | None = None
    device: str = "cpu"
    gpu: int | None = None
    dtype: str = "float32"
    prefill_tokens: int = 8192
    library: str = "torch"
    starts_early: bool | None = None


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """Base URL and process id of an engine."""

    url: str
    pid: int


@contextmanager
def served(order: EngineOrder) -> Iterator[ServedEngine]:
    """Start an engine and yield it once it answers. Raises RuntimeError if the engine does not start."""
    with spawned(_serve, order) as child:
        yield ServedEngine(f"http://127.0.0.1:{child.first}", child.pid)


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """A prompt, the tokens that the engine sampled after it, and their log-probs as f32."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: NDArray[np.float32]


def logprobs_of(sampled: Sequence[SampledAnswer]) -> NDArray[np.float32]:
    """Return the log-probs of all sampled tokens, one answer after another."""
    return np.concatenate([each.logprobs for each in sampled])


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """An engine in this process, called from synchronous code."""

    engine: BatchingEngine
    runner: asyncio.Runner

    def sample(self, prompts: Sequence[list[int]], tokens: int | Sequence[int]) -> list[SampledAnswer]:
        """Sample one answer per prompt, all together; `tokens` is the answers' length, or a length for each answer."""
        lengths = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
        requests = [
            ChatCompletionRequest(prompt_token_ids=prompt, max_tokens=length, seed=seed, return_token_ids=True)
            for seed, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        choices = [answer.choices[0] for answer in self.runner.run(self._complete(requests))]
        return [
            SampledAnswer(prompt, list(choice.token_ids or ()), np.array(choice.token_logprobs, np.float32))
            for prompt, choice in zip(prompts, choices, strict=True)
        ]

    async def _complete(self, requests: Sequence[ChatCompletionRequest]) -> list[ChatCompletion]:
        return await asyncio.gather(*map(self.engine.complete, requests))


@contextmanager
def local(order: EngineOrder) -> Iterator[LocalEngine]:
    """Start an engine in this process for the duration of the context."""
    with asyncio.Runner() as runner:
        engine = _engine(order, [])
        runner.run(engine.start())
        try:
            yield LocalEngine(engine, runner)
        finally:
            runner.run(engine.close())


async def publish(
    publisher: Publisher,
    version: int,
    layout: WeightLayout,
    weights: WeightSource,
    engines: Sequence[str],
    *,
    membership: int = 1,
) -> PublishReport:
    """Send the weights to `engines` (base URLs) as `version`. Raises RuntimeError if an engine does not serve it."""
    report = await publisher.publish(
        Publication(version=version, epoch=1, layout=layout, weights=weights, engines=engines, membership=membership)
    )
    if report.failed:
        raise RuntimeError(f"version {version} was not published: {report.failed}")
    return report


class RunnerWith:
    """A model runner whose `decode` method is replaced by a function with the same signature."""

    def __init__(self, runner: Any, decode: Callable[[int], tuple[list[int], list[float]]]) -> None:
        self._runner, self.decode = runner, decode

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)


def engine_options(order: EngineOrder) -> EngineOptions:
    """Return the options of the engine, with room for any number of waiting requests."""
    return EngineOptions(
        model_path=order.folder,
        model_id="debug",
        max_waiting=65536,
        slots=order.slots,
        context_length=order.context,
        device=Device(order.device),
        dtype=WeightDType(order.dtype),
        threads=1 if order.device == "cpu" else None,
    )


def _engine(order: EngineOrder, ends: list[float]) -> BatchingEngine:
    library: Any = importlib.import_module(registry.ENGINES[order.library].build.partition(":")[0])
    options = engine_options(order)

    def load() -> Any:
        runner = library.load_runner(options, starts_early=order.starts_early)

        def decode(num_rows: int) -> tuple[list[int], list[float]]:
            answer: tuple[list[int], list[float]] = runner.decode(num_rows)
            ends.append(time.monotonic())
            return answer

        return RunnerWith(runner, decode)

    tokenizer = ChatTokenizer(char_tokenizer(), ())
    return BatchingEngine(options, load=load, tokenizer=tokenizer, prefill_tokens=order.prefill_tokens)


def _serve(order: EngineOrder, port: Connection) -> None:
    if order.core is not None:
        os.sched_setaffinity(0, {order.core})
    if order.gpu is not None:  # before the first use of CUDA
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[order.gpu] if visible else str(order.gpu)
    import torch
    from transformers.utils import logging as transformers_logging

    torch.set_num_threads(1)
    transformers_logging.disable_progress_bar()
    ends: list[float] = []
    engine = _engine(order, ends)
    app = create_app(engine, token=None)
    starts = app.router.lifespan_context

    async def notes(_: Request) -> JSONResponse:
        taken, ends[:] = list(ends), []
        return JSONResponse(taken)

    @asynccontextmanager
    async def lifespan(application: Any) -> Any:
        async with starts(application):
            requests = [asyncio.create_task(_request(engine, order.load)) for _ in range(2)] if order.load else []
            port.send(listener.getsockname()[1])
            try:
                yield
            finally:
                for task in requests:
                    task.cancel()
                await asyncio.gather(*requests, return_exceptions=True)

    app.router.lifespan_context = lifespan
    app.add_route("/notes", notes)
    listener = listen("127.0.0.1", 0)
    with contextlib.suppress(KeyboardInterrupt):
        serve(app, listener)


async def _request(engine: Any, load: Load) -> None:
    request = ChatCompletionRequest(prompt_token_ids=[6, 7, 8], n=load.samples, max_tokens=load.tokens)
    while True:
        await engine.complete(request)
