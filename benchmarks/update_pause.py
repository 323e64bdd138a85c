"""Measure how long an engine decodes no tokens during an update, compared with a memcpy of the bytes.

A torch engine with a random decoder decodes in a process of its own. The trainer is another process, which publishes
through HTTP and gloo, at a lower priority (nice) because the two share cores. The engine's decode thread records the
end of each step. Per update:

    longest   the longest time between two steps from PREPARE to the answer to COMMIT
    control   the longest time between two steps in an equally long period without an update
    step      the median time between two steps in that period
    memcpy    one copy of the model's bytes while the engine is idle: the lower bound for an in-place update

`extra` is longest − step. On one core the trainer, the receiving thread and the decode thread take turns, which
adds to `longest`. Targets: (longest − control) / step at most 1 at 24 MB; extra / memcpy at most 0.1 at 310 MB.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.gpu_device import copy_seconds
from benchmarks.measure import Row, bootstrap_median, report
from benchmarks.processes import spawned
from benchmarks.served_engine import EngineOrder, publish, served
from inference_contract.schemas import ChatCompletionRequest
from inference_contract.weights import Backend, WeightLayout
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.plugins.warmstart.tiny_decoder import DebugSize, random_decoder
from pipelinerl.system import http_client
from pipelinerl.weights.broadcast.publisher import BroadcastPublisher
from pipelinerl.weights.publisher import WeightSource

SLOTS: Final = 4
CONTEXT: Final = 2048

#: Measurements of an update in seconds, by name of the measurement.
Update = dict[str, float]


def _gaps(notes: Sequence[float], start: float, end: float) -> list[float]:
    """Return the gaps between the ends of consecutive steps, for all gaps that overlap the period [start, end]."""
    return [b - a for a, b in pairwise(notes) if b >= start and a <= end]


def _trainer(url: str, rounds: int, pipe: Connection) -> None:
    os.nice(10)
    torch.set_num_threads(1)
    pipe.send(asyncio.run(_measure(url, rounds)))


async def _measure(url: str, rounds: int) -> tuple[list[Update], int]:
    updates = []
    async with update_meter(url) as meter:
        layout = meter.layout
        source = [(p.name, torch.full(p.shape, 0.01, dtype=getattr(torch, p.dtype.value))) for p in layout.parameters]
        for _ in range(rounds + 1):
            memcpy = copy_seconds(layout.num_bytes, torch.device("cpu"))
            requests = asyncio.create_task(_keep_busy(meter.client, url))
            await meter.decoded(8)
            updates.append({**await meter.update(lambda: iter(source)), "memcpy": memcpy})
            requests.cancel()
            await asyncio.gather(requests, return_exceptions=True)
    return updates[1:], layout.num_bytes  # the first round is a warm-up


@dataclass(slots=True)
class UpdateMeter:
    """Publishes versions to an engine of `served_engine` while it decodes, and measures each update."""

    url: str
    client: EngineClient
    publisher: BroadcastPublisher
    layout: WeightLayout
    version: int = 0

    async def decoded(self, count: int, *, timeout_s: float = 60.0) -> None:
        """Return once the engine has taken `count` more decode steps."""
        first = (await self.client.metrics(self.url))["decode_steps_total"]
        async with asyncio.timeout(timeout_s):
            while (await self.client.metrics(self.url))["decode_steps_total"] < first + count:
                await asyncio.sleep(0.01)

    async def update(self, weights: WeightSource) -> Update:
        """Publish the next version; return seconds: those of the module, the engine's `pause`, and the `total`."""
        self.version += 1
        began = time.monotonic()
        report = await publish(self.publisher, self.version, self.layout, weights, [self.url])
        ended = time.monotonic()
        await asyncio.sleep(ended - began + 0.1)
        async with http_client.async_session(self.url, timeout_s=60.0) as session:
            notes = (await session.get("/notes")).json()
        card = (await self.client.models(self.url)).data[0]
        if (card.model_version, card.digest) != (self.version, report.digest):
            raise RuntimeError(f"expected version {self.version} with its digest to serve, got {card.model_version}")
        during, after = _gaps(notes, began, ended), _gaps(notes, ended + 0.05, ended + 0.05 + ended - began)
        return {
            "longest": max(during),
            "control": max(after),
            "step": float(np.median(after)),
            "pause": report.pauses_s[self.url],
            "total": report.total_s,
        }


@asynccontextmanager
async def update_meter(url: str, *, backend: Backend = Backend.GLOO) -> AsyncIterator[UpdateMeter]:
    """Yield a meter of the engine at `url`, whose weights travel over `backend`."""
    async with EngineClient(state_timeout_s=60.0) as client:
        publisher = BroadcastPublisher(client, backend=backend)
        yield UpdateMeter(url, client, publisher, (await client.models(url)).data[0].layout)
        await publisher.close()


async def _keep_busy(client: EngineClient, url: str) -> None:
    request = ChatCompletionRequest(prompt_token_ids=[6, 7, 8], n=SLOTS, max_tokens=CONTEXT - 8, seed=1)
    while True:
        await client.chat(url, request)


def _size(size: DebugSize, rounds: int) -> tuple[list[Update], int]:
    with tempfile.TemporaryDirectory() as folder:
        random_decoder(size).save_pretrained(folder)
        order = EngineOrder(folder=Path(folder), slots=SLOTS, context=CONTEXT)
        with served(order) as engine, spawned(_trainer, engine.url, rounds, timeout_s=600.0) as trainer:
            updates, num_bytes = trainer.first
            return updates, num_bytes


def run(quick: bool = False) -> None:
    """Run the benchmark, print its table and, unless `quick`, write its record."""
    sizes = (DebugSize.MB_3,) if quick else (DebugSize.MB_3, DebugSize.MB_24, DebugSize.MB_310)
    payload: dict[str, Any] = {}
    rows: list[Row] = []
    for size in sizes:
        updates, num_bytes = _size(size, rounds=3 if quick else 9)
        seconds = {key: np.array([each[key] for each in updates]) for key in updates[0]}
        in_steps = bootstrap_median((seconds["longest"] - seconds["control"]) / seconds["step"])
        extra = bootstrap_median((seconds["longest"] - seconds["step"]) / seconds["memcpy"])
        pause = bootstrap_median(seconds["pause"] / seconds["memcpy"])
        name, middle, large = f"{num_bytes / 1e6:.1f} MB", size is DebugSize.MB_24, size is DebugSize.MB_310
        rows += [
            Row(f"{name}: (longest - control) / step", in_steps, *(("<= 1", in_steps.median <= 1) if middle else ())),
            Row(f"{name}: extra / memcpy", extra, *(("<= 0.1", extra.median <= 0.1) if large else ())),
            Row(f"{name}: engine's own pause / memcpy", pause),
        ]
        payload[name] = {
            "num_bytes": num_bytes,
            "longest_minus_control_in_steps": in_steps.as_dict(),
            "extra_over_memcpy": extra.as_dict(),
            "pause_over_memcpy": pause.as_dict(),
            "median_ms": {key: float(np.median(values)) * 1e3 for key, values in seconds.items()},
            "samples_s": {key: values.tolist() for key, values in seconds.items()},
        }
    report("update_pause", rows, payload, quick=quick, title="update_pause: how long tokens stop for new weights")
