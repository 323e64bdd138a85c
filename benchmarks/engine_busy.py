"""Measure how much of its speed the engine loses while the trainer trains on another core.

The engine and the trainer are each pinned to a core of their own. The engine constantly decodes eight samples of a 3 MB
decoder; the requests come from within its process (`served_engine.Load`), because a client would take part of a core.
Windows of a few seconds alternate between three modes of the trainer's process:

    alone       the trainer sleeps
    training    the trainer takes RL steps through `TorchTrainer` (forward, backward, AdamW)
    publishing  the trainer takes RL steps and broadcasts the weights after every step, over HTTP and gloo

The results are the engine's tokens/s in `training` and `publishing`, divided by those in `alone`: target 0.90, goal
0.98. They also depend on the machine: if the two cores are hardware threads of one core, or other programs use them,
the engine slows down as well.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.measure import Row, paired, print_table, write_record
from benchmarks.processes import Child, spawned
from benchmarks.served_engine import EngineOrder, Load, ServedEngine, publish, served
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.plugins.warmstart.tiny_decoder import DebugSize, random_decoder

_LOAD: Final = Load(samples=8, tokens=256)
_SETTLE_S: Final = 0.3


class Mode(StrEnum):
    """The trainer's work during a window."""

    ALONE = "alone"
    TRAINING = "training"
    PUBLISHING = "publishing"


def _trainer(folder: Path, url: str, core: int, pipe: Connection) -> None:
    os.sched_setaffinity(0, {core})
    asyncio.run(_follow(folder, url, pipe))


async def _follow(folder: Path, url: str, pipe: Connection) -> None:
    """Receive (mode, seconds) from the pipe, work that long in this mode, send back the number of steps; repeat."""
    async with EngineClient(state_timeout_s=60.0) as client:
        work = _work(folder, url, client)
        for step in work.values():  # warm up and join the process group before the measurements
            await step()
        pipe.send("ready")
        while True:
            mode, seconds = pipe.recv()
            ends, steps = time.monotonic() + seconds, 0
            while time.monotonic() < ends:
                await work[mode]()
                steps += 1
            pipe.send(steps)


def _work(folder: Path, url: str, client: EngineClient) -> dict[Mode, Callable[[], Any]]:
    import torch

    from benchmarks.torch_step import rl_step, trainer_of
    from benchmarks.trainer import RATE, ragged_batch
    from pipelinerl.rng import generator
    from pipelinerl.weights.broadcast.publisher import BroadcastPublisher
    from pipelinerl.weights.publisher import wire_layout

    torch.set_num_threads(1)
    trainer, publisher = trainer_of(folder), BroadcastPublisher(client)
    layout = wire_layout(trainer.weight_layout())
    batch = ragged_batch(generator(0, "engine_busy").integers(4, 25, 64), seed=1)

    async def step() -> None:
        rl_step(trainer, batch, learning_rate=RATE)

    async def step_and_publish() -> None:
        await step()
        await publish(publisher, trainer.model_version, layout, trainer.gather_weights, [url])

    return {Mode.TRAINING: step, Mode.PUBLISHING: step_and_publish}


def _arm(mode: Mode, engine: ServedEngine, trainer: Child, window_s: float, done: list[int]) -> Callable[[], float]:
    def tokens_per_s() -> float:
        if mode is not Mode.ALONE:
            trainer.pipe.send((mode, window_s + 2 * _SETTLE_S))
        time.sleep(_SETTLE_S)
        first, began = _tokens(engine.url), time.monotonic()
        time.sleep(window_s)
        rate = (_tokens(engine.url) - first) / (time.monotonic() - began)
        done.append(0 if mode is Mode.ALONE else trainer.pipe.recv())
        return rate

    return tokens_per_s


def _tokens(url: str) -> float:
    async def generated() -> float:
        async with EngineClient(state_timeout_s=60.0) as client:
            return (await client.metrics(url))["generated_tokens_total"]

    return asyncio.run(generated())


def measure(*, rounds: int, window_s: float) -> dict[str, Any]:
    """Measure `rounds` windows of `window_s` seconds in each mode, print the table and return the record's payload."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError(f"expected two cores, one for the engine and one for the trainer, got {len(cores)}")
    done: dict[str, list[int]] = {mode.value: [] for mode in Mode}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_decoder(DebugSize.MB_3).save_pretrained(folder)
        order = EngineOrder(folder=folder, slots=_LOAD.samples, context=512, load=_LOAD, core=cores[0])
        with served(order) as engine, spawned(_trainer, folder, engine.url, cores[1]) as trainer:
            arms = {mode.value: _arm(mode, engine, trainer, window_s, done[mode.value]) for mode in Mode}
            timings = paired(arms, rounds)
    ratios = {f"{mode} / alone": timings.ratio(mode, Mode.ALONE) for mode in (Mode.TRAINING, Mode.PUBLISHING)}
    rows = [Row(name, ratio, ">= 0.90 (goal 0.98)", ratio.median >= 0.90) for name, ratio in ratios.items()]
    rows += [Row(f"    tokens/s, {mode}", timings.median(mode)) for mode in Mode]
    print_table("engine_busy: tokens/s of the engine while the trainer trains on another core", rows)
    return {
        "ratios": {name: ratio.as_dict() for name, ratio in ratios.items()},
        "tokens_per_s": timings.as_dict(),
        "rounds_per_window": {mode: float(np.median(counts)) for mode, counts in done.items()},
        "load_average": os.getloadavg()[0],
        "window_s": window_s,
    }


def run(quick: bool = False) -> None:
    """Run the benchmark, print its table and, unless `quick`, write its record."""
    payload = measure(rounds=3 if quick else 10, window_s=1.0 if quick else 3.0)
    write_record("engine_busy", payload, quick=quick)
