"""What the engine loses while the trainer trains beside it: tokens/s busy over tokens/s alone, at least 0.90.

The engine's process is pinned to one core, the trainer's to another; both belong to their owner alone. The engine
decodes eight samples of a 3 MB decoder all the time, asked from within its own process (`served_engine.Load`): a client
would disturb one of the two. Windows of some seconds follow one another, in turn forwards and backwards:

    alone       the trainer's process sleeps
    spin        it runs a bare loop that touches no memory: what this machine itself takes when its other core works
    training    it does RL steps through `TorchTrainer` (forward, backward, AdamW), one after the other
    publishing  the same, and after every step it broadcasts the weights in flight, over HTTP and gloo

`training` and `publishing` over `alone` are the figures. Over `spin` they say what is ours and what is the machine's:
two threads of one core, or cores that others use too, slow one another whatever runs. Tokens are counted by the engine.
Tokens for a second of the engine's own processor time leave out what other programs take of its core, and are shown
beside the figures, not in place of them. Target 0.90, hoped for 0.98.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import psutil

from benchmarks.measure import Interval, Paired, Row, paired, print_table, write_record
from benchmarks.served_engine import EngineOrder, Load, ServedEngine, served
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.models.tiny_decoder import DebugSize, random_decoder

_LOAD: Final = Load(samples=8, tokens=256)
_SETTLE_S: Final = 0.3
_ANSWER_TIMEOUT_S: Final = 120.0


class Mode(StrEnum):
    """What the trainer's process does during a window."""

    ALONE = "alone"
    SPIN = "spin"
    TRAINING = "training"
    PUBLISHING = "publishing"


@dataclass(frozen=True, slots=True)
class TrainerOrder:
    """The trainer's process: its model, its core, the engine that it publishes to."""

    folder: Path
    core: int
    url: str


@final
class Beside:
    """The trainer's process, told from here what to do."""

    def __init__(self, order: TrainerOrder) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_beside, args=(order, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.rounds: dict[Mode, list[int]] = {mode: [] for mode in Mode}
        self._mode = Mode.ALONE
        self._answer()  # it is ready

    def tell(self, mode: Mode) -> None:
        """Do this from now on; returns when it is being done. What the last mode got done is added to `rounds`."""
        self._pipe.send(mode)
        done = self._answer()
        if self._mode is not Mode.ALONE:
            self.rounds[self._mode].append(done)
        self._mode = mode

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.join(10)

    def _answer(self) -> int:
        if not self._pipe.poll(_ANSWER_TIMEOUT_S):
            raise TimeoutError(f"the trainer's process was silent for {_ANSWER_TIMEOUT_S:g} s")
        return int(self._pipe.recv())


def _beside(order: TrainerOrder, pipe: Connection) -> None:
    os.sched_setaffinity(0, {order.core})
    asyncio.run(_follow(order, pipe))


async def _follow(order: TrainerOrder, pipe: Connection) -> None:
    """Do what the pipe says, round after round; a new order is answered with the number of rounds of the last."""
    async with EngineClient(state_timeout_s=60.0) as client:
        work = await _work(order, client)
        for mode in (Mode.TRAINING, Mode.PUBLISHING):  # everything is warm and joined before it is measured
            await work[mode]()
        pipe.send(0)
        mode, rounds = Mode.ALONE, 0
        while True:
            if mode is Mode.ALONE or pipe.poll():
                try:
                    mode = pipe.recv()
                except EOFError:
                    return
                pipe.send(rounds)
                rounds = 0
            if mode is not Mode.ALONE:
                await work[mode]()
                rounds += 1


async def _work(order: TrainerOrder, client: EngineClient) -> dict[Mode, Callable[[], Any]]:
    """One round of each mode."""
    import torch

    from benchmarks.trainer import RATE, ragged_batch
    from pipelinerl.objective.presets import resolve
    from pipelinerl.rng import generator
    from pipelinerl.trainers.torch.trainer import TorchTrainer
    from pipelinerl.weights.broadcast.publisher import BroadcastPublisher
    from pipelinerl.weights.publisher import Publication, wire_layout
    from trainer_contract.types import Device, TrainerSpec

    torch.set_num_threads(1)
    trainer, objective = TorchTrainer(), resolve("pipelinerl")
    trainer.init_worker(TrainerSpec(model_path=order.folder, device=Device.CPU))
    batch = ragged_batch(generator(0, "engine_busy").integers(4, 25, 64), seed=1)
    layout, publisher = wire_layout(trainer.weight_layout()), BroadcastPublisher(client)

    async def spin() -> None:
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            pass

    async def step() -> None:
        trainer.backward([batch], objective)
        trainer.optimizer_step(learning_rate=RATE)

    async def step_and_publish() -> None:
        await step()
        await publisher.publish(
            Publication(
                version=trainer.model_version,
                epoch=1,
                layout=layout,
                weights=trainer.gather_weights,
                engines=[order.url],
                membership=1,
            )
        )

    return {Mode.SPIN: spin, Mode.TRAINING: step, Mode.PUBLISHING: step_and_publish}


@final
class Meter:
    """Reads the engine's own counter over a window."""

    def __init__(self, engine: ServedEngine, beside: Beside, window_s: float) -> None:
        self._engine = engine
        self._process = psutil.Process(engine.pid)
        self._beside = beside
        self._window_s = window_s
        self.per_cpu_second: dict[Mode, list[float]] = {mode: [] for mode in Mode}

    def arm(self, mode: Mode) -> Callable[[], float]:
        """An arm: tokens/s of the engine during one window of `mode`."""

        def tokens_per_s() -> float:
            self._beside.tell(mode)
            time.sleep(_SETTLE_S)
            first, began, used = self._tokens(), time.monotonic(), self._cpu_seconds()
            time.sleep(self._window_s)
            tokens = self._tokens() - first
            seconds, cpu_seconds = time.monotonic() - began, self._cpu_seconds() - used
            self._beside.tell(Mode.ALONE)
            self.per_cpu_second[mode].append(tokens / cpu_seconds)
            return tokens / seconds

        return tokens_per_s

    def _tokens(self) -> float:
        return asyncio.run(_metrics(self._engine.url))["generated_tokens_total"]

    def _cpu_seconds(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


async def _metrics(url: str) -> dict[str, float]:
    async with EngineClient(state_timeout_s=60.0) as client:
        return await client.metrics(url)


def measure(*, rounds: int, window_s: float) -> dict[str, Any]:
    """All windows, the table, and the record's payload."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError(f"expected two cores, one for the engine and one for the trainer, got {len(cores)}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_decoder(DebugSize.MB_3).save_pretrained(folder)
        order = EngineOrder(folder=folder, slots=_LOAD.samples, context=512, load=_LOAD, core=cores[0])
        with served(order) as engine:
            beside = Beside(TrainerOrder(folder, cores[1], engine.url))
            try:
                meter = Meter(engine, beside, window_s)
                timings = paired({mode.value: meter.arm(mode) for mode in Mode}, rounds)
            finally:
                beside.close()
    own = Paired({mode.value: tuple(meter.per_cpu_second[mode][-rounds:]) for mode in Mode})
    per_window = {mode.value: float(np.median(done)) for mode, done in beside.rounds.items() if done}
    print_table("engine_busy: tokens/s while the trainer trains beside it", _rows(timings, own, per_window))
    return {
        "ratios": {name: ratio.as_dict() for name, ratio in _ratios(timings).items()},
        "ratios_per_cpu_second": {name: ratio.as_dict() for name, ratio in _ratios(own).items()},
        "tokens_per_s": timings.as_dict(),
        "tokens_per_cpu_s": own.as_dict(),
        "rounds_per_window": per_window,
        "cores": {"engine": cores[0], "trainer": cores[1], "siblings": _siblings(cores[0])},
        "load_average": os.getloadavg()[0],
        "window_s": window_s,
    }


def _ratios(measured: Paired) -> dict[str, Interval]:
    """The figures first."""
    pairs = [(mode, base) for base in (Mode.ALONE, Mode.SPIN) for mode in (Mode.TRAINING, Mode.PUBLISHING)]
    return {f"{mode} / {base}": measured.ratio(mode, base) for mode, base in [*pairs, (Mode.SPIN, Mode.ALONE)]}


def _rows(timings: Paired, own: Paired, per_window: dict[str, float]) -> list[Row]:
    figures = {f"{mode} / {Mode.ALONE}" for mode in (Mode.TRAINING, Mode.PUBLISHING)}
    rows = []
    for name, ratio in _ratios(timings).items():
        met = ratio.median >= 0.90 if name in figures else None
        rows.append(Row(name, ratio, ">= 0.90 (goal 0.98)" if name in figures else "", met))
    rows += [Row(f"{name}, per cpu second", ratio) for name, ratio in _ratios(own).items()]
    rows += [Row(f"    tokens/s {mode}", timings.median(mode)) for mode in Mode]
    done = f"{per_window[Mode.TRAINING]:g} / {per_window[Mode.PUBLISHING]:g}"
    return [*rows, Row("    steps per window, training / publishing", done)]


def _siblings(core: int) -> str:
    """The hardware threads that share a core with this one, as Linux writes them."""
    file = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
    return file.read_text().strip() if file.is_file() else "unknown"


def run(quick: bool = False) -> dict[str, Any]:
    """Measure, print, record."""
    payload = measure(rounds=3 if quick else 10, window_s=1.0 if quick else 3.0)
    write_record("engine_busy", {"quick": quick, **payload})
    return payload
