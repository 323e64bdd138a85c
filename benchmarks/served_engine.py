"""`served`: a torch engine in a process of its own, behind the contract's routes, for the benchmarks that need one.

No token ends a sample: lengths are what is asked for. With a `Load` the engine keeps itself busy from its own event
loop, so that no client takes part of a core. GET /notes answers with the ends of its decode steps since the last time,
on the system's monotonic clock; the swap to new weights is a negative time. The process ends with the context.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, final

from starlette.requests import Request
from starlette.responses import JSONResponse

from inference_contract.schemas import ChatCompletionRequest

_START_TIMEOUT_S: Final = 180.0


@dataclass(frozen=True, slots=True)
class Load:
    """Requests without end: always one running and one waiting, each of `samples` samples of `tokens` tokens."""

    samples: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOrder:
    """What to serve. `core` pins the whole process; `device` and `dtype` are the engine's own words."""

    folder: Path
    slots: int
    context: int
    load: Load | None = None
    core: int | None = None
    device: str = "cpu"
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class ServedEngine:
    """Where it is."""

    url: str
    pid: int


@contextmanager
def served(order: EngineOrder) -> Iterator[ServedEngine]:
    """The engine, once it answers.

    Raises:
        RuntimeError: it did not start; its own output says why.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(order, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(_START_TIMEOUT_S):
            raise RuntimeError(f"the engine did not start within {_START_TIMEOUT_S:g} s")
        try:
            port = ours.recv()
        except EOFError:
            raise RuntimeError("the engine ended before it served; see its output above") from None
        assert process.pid is not None
        yield ServedEngine(f"http://127.0.0.1:{port}", process.pid)
    finally:
        process.terminate()
        process.join(10)


@final
class Stopwatch:
    """A model runner that notes when each of its steps ends."""

    def __init__(self, runner: Any, ends: list[float]) -> None:
        self._runner = runner
        self._ends = ends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def decode(self, num_rows: int) -> tuple[list[int], list[float]]:
        """Run one step and note its end."""
        answer: tuple[list[int], list[float]] = self._runner.decode(num_rows)
        self._ends.append(time.monotonic())
        return answer

    def swap(self) -> None:
        """Swap weights and note the time as a negative number."""
        self._runner.swap()
        self._ends.append(-time.monotonic())


def _serve(order: EngineOrder, port: Connection) -> None:
    """The process: sends its port once the engine is loaded."""
    if order.core is not None:
        os.sched_setaffinity(0, {order.core})
    import torch
    from transformers.utils import logging as transformers_logging

    from pipelinerl.engines.batching.batching_engine import BatchingEngine
    from pipelinerl.engines.http.server import create_app
    from pipelinerl.engines.options import EngineOptions
    from pipelinerl.engines.torch.engine import load_runner
    from pipelinerl.models.tiny_decoder import char_tokenizer
    from pipelinerl.models.tokenizer import ChatTokenizer
    from pipelinerl.system.http_service import listen, serve
    from trainer_contract.types import Device, WeightDType

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(1)
    options = EngineOptions(
        model_path=order.folder,
        model_id="debug",
        max_waiting=4096,
        slots=order.slots,
        context_length=order.context,
        device=Device(order.device),
        dtype=WeightDType(order.dtype),
        threads=1,
    )
    ends: list[float] = []
    watched: Any = lambda: Stopwatch(load_runner(options), ends)  # noqa: E731
    engine = BatchingEngine(options, load=watched, tokenizer=ChatTokenizer(char_tokenizer(), ()))
    app = create_app(engine, token=None)
    starts = app.router.lifespan_context

    async def notes(_: Request) -> JSONResponse:
        taken, ends[:] = list(ends), []
        return JSONResponse(taken)

    @asynccontextmanager
    async def lifespan(application: Any) -> Any:
        async with starts(application):
            asking = [asyncio.create_task(_ask(engine, order.load)) for _ in range(2)] if order.load else []
            port.send(listener.getsockname()[1])
            try:
                yield
            finally:
                for task in asking:
                    task.cancel()
                await asyncio.gather(*asking, return_exceptions=True)

    app.router.lifespan_context = lifespan
    app.add_route("/notes", notes)
    listener = listen("127.0.0.1", 0)
    with contextlib.suppress(KeyboardInterrupt):
        serve(app, listener)


async def _ask(engine: Any, load: Load) -> None:
    request = ChatCompletionRequest(prompt_token_ids=[6, 7, 8], n=load.samples, max_tokens=load.tokens)
    while True:
        await engine.complete(request)
