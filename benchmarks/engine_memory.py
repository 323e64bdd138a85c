"""What an engine holds: never more than two copies of the weights beside its cache, and no more after 1,000 updates.

    copies   a torch engine in a process of its own loads a decoder, takes new weights over gloo and decodes; its
             private memory, less that of an engine with a decoder of some KB, may be two copies of the weights and
             the cache, both as its /metrics name them. What it computes with is in it, and gets an allowance. The C
             library is told to give freed blocks back, of which it would keep some ten MB for later: those are not held
    growth   another takes the weights of the tiny decoder 1,000 times, with requests in between; least squares over the
             second half of the updates say what one hundred updates add to its resident memory, and to the publisher's

Targets: at most 32 MB beyond two copies and the cache; less than 1 MB for 100 updates.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch

from benchmarks.measure import Row, print_table, write_record
from benchmarks.served_engine import EngineOrder, served
from inference_contract.schemas import ChatCompletionRequest
from inference_contract.weights import WeightLayout
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.models.tiny_decoder import DebugSize, DecoderShape, random_decoder
from pipelinerl.weights.broadcast.publisher import BroadcastPublisher
from pipelinerl.weights.publisher import Publication

_MB: Final = 1e6
_ALLOWED: Final = 32e6
_GIVE_BACK: Final = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
#: So small that what is left is what any engine needs.
_NOTHING: Final = DecoderShape(hidden=8, layers=1, heads=1, intermediate=8, vocab=512, max_positions=512)
_TINY: Final = DecoderShape(hidden=64, layers=2, heads=4, intermediate=128, vocab=512, max_positions=512)
_SAMPLES: Final = 8
_CONTEXT: Final = 256
_REQUEST_EVERY: Final = 10


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of one engine: its private memory after updates and decoding, and what its metrics say it may hold."""

    private: int
    weights: int
    cache: int

    def beyond(self, baseline: Held) -> int:
        """Bytes more than two copies of the weights and the cache, given an engine with next to none of either."""
        return self.private - baseline.private - 2 * self.weights - self.cache


@dataclass(frozen=True, slots=True)
class Growth:
    """Resident bytes after each update, of the engine and of the publisher."""

    engine: list[int]
    publisher: list[int]
    seconds: float


def bytes_per_update(resident: Sequence[int]) -> float:
    """Slope of a line through the second half, by least squares.

    Raises:
        ValueError: there are too few to draw a line.
    """
    half = np.asarray(resident[len(resident) // 2 :], dtype=np.float64)
    if half.size < 2:
        raise ValueError(f"expected at least 3 updates, got {len(resident)}")
    return float(np.polyfit(np.arange(half.size), half, 1)[0])


def parameters(layout: WeightLayout) -> list[tuple[str, torch.Tensor]]:
    """Small constant weights: what they are does not matter here."""
    return [(p.name, torch.full(p.shape, 0.01, dtype=getattr(torch, p.dtype.value))) for p in layout.parameters]


async def _update(publisher: BroadcastPublisher, url: str, version: int, layout: WeightLayout, weights: Any) -> None:
    await publisher.publish(
        Publication(version=version, epoch=1, layout=layout, weights=lambda: iter(weights), engines=[url], membership=1)
    )


async def _decode(client: EngineClient, url: str, tokens: int) -> None:
    await client.chat(url, ChatCompletionRequest(prompt_token_ids=[6, 7, 8], n=_SAMPLES, max_tokens=tokens, seed=1))


async def _held(url: str, pid: int) -> Held:
    """After two updates, so that both buffers have been written, and sequences that fill the cache."""
    async with EngineClient(state_timeout_s=60.0) as client:
        layout = (await client.models(url)).data[0].layout
        publisher, weights = BroadcastPublisher(client), parameters(layout)
        for version in (1, 2):
            await _update(publisher, url, version, layout, weights)
            await _decode(client, url, _CONTEXT - 8)
        await publisher.close()
        metrics = await client.metrics(url)
    private = int(psutil.Process(pid).memory_full_info().uss)
    return Held(private, int(metrics["weight_bytes"]), int(metrics["cache_bytes"]))


def held(shape: DecoderShape | DebugSize) -> Held:
    """What an engine of this shape holds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_decoder(shape).save_pretrained(folder)
        with _giving_back(), served(EngineOrder(folder=folder, slots=_SAMPLES, context=_CONTEXT)) as engine:
            return asyncio.run(_held(engine.url, engine.pid))


@contextmanager
def _giving_back() -> Iterator[None]:
    """Processes started in this context return large freed blocks to the system at once (glibc reads it at start)."""
    os.environ |= _GIVE_BACK
    try:
        yield
    finally:
        for name in _GIVE_BACK:
            del os.environ[name]


async def _grown(url: str, pid: int, updates: int) -> Growth:
    engine, publisher_process = psutil.Process(pid), psutil.Process()
    grown, began = Growth([], [], 0.0), time.monotonic()
    async with EngineClient(state_timeout_s=60.0) as client:
        layout = (await client.models(url)).data[0].layout
        publisher, weights = BroadcastPublisher(client), parameters(layout)
        for version in range(1, updates + 1):
            await _update(publisher, url, version, layout, weights)
            if version % _REQUEST_EVERY == 0:
                await _decode(client, url, 16)
            grown.engine.append(engine.memory_info().rss)
            grown.publisher.append(publisher_process.memory_info().rss)
        await publisher.close()
    return Growth(grown.engine, grown.publisher, time.monotonic() - began)


def growth(updates: int) -> Growth:
    """Resident memory over so many updates."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_decoder(_TINY).save_pretrained(folder)
        with served(EngineOrder(folder=folder, slots=_SAMPLES, context=_CONTEXT)) as engine:
            return asyncio.run(_grown(engine.url, engine.pid, updates))


def run(quick: bool = False) -> dict[str, Any]:
    """Measure, print, record."""
    torch.set_num_threads(1)
    baseline, full = held(_NOTHING), held(DebugSize.MB_24 if quick else DebugSize.MB_310)
    beyond = full.beyond(baseline)
    grown = growth(200 if quick else 1000)
    slopes = {name: 100 * bytes_per_update(getattr(grown, name)) / _MB for name in ("engine", "publisher")}
    rows = [
        Row("beyond two copies and the cache [MB]", beyond / _MB, f"<= {_ALLOWED / _MB:g}", beyond <= _ALLOWED),
        Row("    one copy / cache budget [MB]", f"{full.weights / _MB:.0f} / {full.cache / _MB:.0f}"),
        Row(
            "    private memory, with next to no weights [MB]",
            f"{full.private / _MB:.0f}, {baseline.private / _MB:.0f}",
        ),
    ]
    rows += [Row(f"{name}: MB for 100 updates", slope, "< 1", slope < 1.0) for name, slope in slopes.items()]
    rows.append(Row(f"    {len(grown.engine)} updates, ms each", 1e3 * grown.seconds / len(grown.engine)))
    print_table("engine_memory: copies of the weights, and growth over updates", rows)
    payload = {
        "quick": quick,
        "beyond_bytes": beyond,
        "private_bytes": full.private,
        "weight_bytes": full.weights,
        "cache_bytes": full.cache,
        "baseline_private_bytes": baseline.private,
        "megabytes_per_100_updates": slopes,
        "updates": len(grown.engine),
        "resident_bytes": {name: getattr(grown, name)[:: max(1, len(grown.engine) // 50)] for name in slopes},
        "load_average": os.getloadavg()[0],
    }
    write_record("engine_memory", payload)
    return payload


if __name__ == "__main__":
    run(quick="--quick" in sys.argv)
