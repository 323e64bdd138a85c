"""Torch engines for benchmarks: `served` starts one in a separate process, `local` in this process.

No token ends a sample, so every answer has the length that its request asks for. With a `Load`, a served engine
generates requests on its own event loop, since a client would take part of a core. GET /notes returns the times at
which decode steps ended since the last GET, on the system's monotonic clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

from starlette.requests import Request
from starlette.responses import JSONResponse

from benchmarks.processes import spawned
from inference_contract.schemas import ChatCompletion, ChatCompletionRequest


@dataclass(frozen=True, slots=True)
class Load:
    """Endless requests for `samples` samples of `tokens` tokens each; one runs and the next one waits."""

    samples: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOrder:
    """An engine's settings; its process is pinned to `core`, if given."""

    folder: Path
    slots: int
    context: int
    load: Load | None = None
    core: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    prefill_tokens: int | None = None


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


@final
class LocalEngine:
    """An engine in this process, called from synchronous code."""

    def __init__(self, order: EngineOrder) -> None:
        self.engine = _engine(order, [])
        self._runner = asyncio.Runner()
        self._runner.run(self.engine.start())

    def complete(self, requests: Sequence[ChatCompletionRequest]) -> list[ChatCompletion]:
        """Send all requests together, and return their answers."""
        return self._runner.run(self._complete(requests))

    async def _complete(self, requests: Sequence[ChatCompletionRequest]) -> list[ChatCompletion]:
        return list(await asyncio.gather(*(self.engine.complete(each) for each in requests)))

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self._runner.run(self.engine.close())
        self._runner.close()


@contextmanager
def local(order: EngineOrder) -> Iterator[LocalEngine]:
    """Start an engine in this process for the duration of the context."""
    engine = LocalEngine(order)
    try:
        yield engine
    finally:
        engine.close()


@final
class _Stopwatch:
    def __init__(self, runner: Any, ends: list[float]) -> None:
        self._runner = runner
        self._ends = ends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def decode(self, num_rows: int) -> tuple[list[int], list[float]]:
        answer: tuple[list[int], list[float]] = self._runner.decode(num_rows)
        self._ends.append(time.monotonic())
        return answer


def _engine(order: EngineOrder, ends: list[float]) -> Any:
    from pipelinerl.engines.batching.batching_engine import BatchingEngine
    from pipelinerl.engines.options import EngineOptions
    from pipelinerl.engines.torch.engine import load_runner
    from pipelinerl.models.tiny_decoder import char_tokenizer
    from pipelinerl.models.tokenizer import ChatTokenizer
    from trainer_contract.types import Device, WeightDType

    options = EngineOptions(
        model_path=order.folder,
        model_id="debug",
        max_waiting=65536,
        slots=order.slots,
        context_length=order.context,
        device=Device(order.device),
        dtype=WeightDType(order.dtype),
        threads=1 if order.device == "cpu" else None,
    )
    watched: Any = lambda: _Stopwatch(load_runner(options), ends)  # noqa: E731
    prefill: dict[str, Any] = {} if order.prefill_tokens is None else {"prefill_tokens": order.prefill_tokens}
    return BatchingEngine(options, load=watched, tokenizer=ChatTokenizer(char_tokenizer(), ()), **prefill)


def _serve(order: EngineOrder, port: Connection) -> None:
    if order.core is not None:
        os.sched_setaffinity(0, {order.core})
    import torch
    from transformers.utils import logging as transformers_logging

    from pipelinerl.engines.http.server import create_app
    from pipelinerl.system.http_service import listen, serve

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
