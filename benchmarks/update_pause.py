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
import multiprocessing
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.measure import Interval, Row, bootstrap_median, print_table, write_record
from benchmarks.served_engine import EngineOrder, served
from inference_contract.schemas import ChatCompletionRequest
from inference_contract.weights import WeightLayout
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.models.tiny_decoder import DebugSize, random_decoder
from pipelinerl.system import http_client
from pipelinerl.weights.broadcast.publisher import BroadcastPublisher
from pipelinerl.weights.publisher import Publication

SLOTS: Final = 4
CONTEXT: Final = 2048
_NAMES: Final = ("longest", "control", "step", "memcpy", "pause", "total")


#: Measurements of each update in seconds, by name of the measurement.
Samples = dict[str, list[float]]


def _ratio(samples: Samples, above: str, minus: str | None, below: str) -> Interval:
    subtracted = samples[minus] if minus else [0.0] * len(samples[above])
    rows = zip(samples[above], subtracted, samples[below], strict=True)
    return bootstrap_median([(a - m) / b for a, m, b in rows])


def _gaps(notes: Sequence[float], start: float, end: float) -> list[float]:
    """Return the gaps between the ends of consecutive steps, for all gaps that overlap the period [start, end]."""
    return [b - a for a, b in pairwise(notes) if b >= start and a <= end]


def _trainer(url: str, rounds: int) -> tuple[Samples, int]:
    torch.set_num_threads(1)
    return asyncio.run(_measure(url, rounds))


async def _measure(url: str, rounds: int) -> tuple[Samples, int]:
    async with EngineClient(state_timeout_s=60.0) as client, http_client.async_session(url) as plain:
        layout = (await client.models(url)).data[0].layout
        publisher = BroadcastPublisher(client)
        source = _parameters(layout)
        samples: Samples = {name: [] for name in _NAMES}
        spare = np.empty(layout.num_bytes, np.uint8)
        for number in range(-1, rounds):  # the first round, a warm-up, is discarded
            memcpy = _copy_seconds(spare)
            requests = asyncio.create_task(_keep_busy(client, url))
            await _steps(client, url, 8)
            began = time.monotonic()
            publication = Publication(
                version=number + 2, epoch=1, layout=layout, weights=lambda: iter(source), engines=[url], membership=1
            )
            report = await publisher.publish(publication)
            ended = time.monotonic()
            await asyncio.sleep(ended - began + 0.1)
            requests.cancel()
            await asyncio.gather(requests, return_exceptions=True)
            notes = (await plain.get("/notes", timeout=60.0)).json()
            if number < 0:
                continue
            during, after = _gaps(notes, began, ended), _gaps(notes, ended + 0.05, ended + 0.05 + ended - began)
            row = (max(during), max(after), float(np.median(after)), memcpy)
            for name, seconds in zip(_NAMES, (*row, report.pauses_s[url], report.total_s), strict=True):
                samples[name].append(seconds)
        await publisher.close()
    return samples, layout.num_bytes


def _parameters(layout: WeightLayout) -> list[tuple[str, Any]]:
    return [(p.name, torch.full(p.shape, 0.01, dtype=getattr(torch, p.dtype.value))) for p in layout.parameters]


async def _steps(client: EngineClient, url: str, count: int, *, timeout_s: float = 60.0) -> None:
    first = (await client.metrics(url))["decode_steps_total"]
    async with asyncio.timeout(timeout_s):
        while (await client.metrics(url))["decode_steps_total"] < first + count:
            await asyncio.sleep(0.01)


async def _keep_busy(client: EngineClient, url: str) -> None:
    request = ChatCompletionRequest(prompt_token_ids=[6, 7, 8], n=SLOTS, max_tokens=CONTEXT - 8, seed=1)
    while True:
        await client.chat(url, request)


def _copy_seconds(target: np.ndarray[Any, Any]) -> float:
    origin = np.zeros_like(target)
    origin[::4096] = 1
    took = []
    for _ in range(3):
        began = time.perf_counter()
        np.copyto(target, origin)
        took.append(time.perf_counter() - began)
    return min(took)


def _size(size: DebugSize, rounds: int) -> tuple[Samples, int]:
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        random_decoder(size).save_pretrained(folder)
        with (
            served(EngineOrder(folder=Path(folder), slots=SLOTS, context=CONTEXT)) as engine,
            ProcessPoolExecutor(1, mp_context=spawn, initializer=os.nice, initargs=(10,)) as apart,
        ):
            return apart.submit(_trainer, engine.url, rounds).result(timeout=600)


def run(quick: bool = False) -> None:
    """Run the benchmark, print its table and, unless `quick`, write its record."""
    sizes = (DebugSize.MB_3,) if quick else (DebugSize.MB_3, DebugSize.MB_24, DebugSize.MB_310)
    payload: dict[str, Any] = {}
    rows: list[Row] = []
    for size in sizes:
        samples, num_bytes = _size(size, rounds=3 if quick else 9)
        in_steps, extra = _ratio(samples, "longest", "control", "step"), _ratio(samples, "longest", "step", "memcpy")
        pause = _ratio(samples, "pause", None, "memcpy")
        name, middle, large = f"{num_bytes / 1e6:.1f} MB", size is DebugSize.MB_24, size is DebugSize.MB_310
        median = {key: float(np.median(values)) * 1e3 for key, values in samples.items()}
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
            "median_ms": median,
            "samples_s": samples,
        }
    print_table("update_pause: how long tokens stop for new weights", rows)
    write_record("update_pause", payload, quick=quick)
