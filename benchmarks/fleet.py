"""What an update of many engines costs beside the bytes: control, by the number of engines and of tensors.

Engines here are everything of an engine that an update passes through (HTTP server, receiver, endpoint in a gloo
group) without a model; several share a process. The trainer's side is the real publisher. As in a run, there is a
token, and each process takes what it has loaded out of garbage collection. Each fleet exists twice:

    real        the tensors are 8 MB in all
    1-byte      as many tensors of one byte each: what remains is control

`control` is the time of a 1-byte update outside the broadcast: PREPARE and COMMIT of every engine at once. `trainer` is
the processor time that the trainer's process spends on it, the engines' being theirs: on two cores, 64 engines that
answer two requests each take turns, which they would not do on machines of their own; `engines` is the processor time
of all of them. What any control by HTTP costs here is `plain`: every engine is asked twice for its health. `phase` is
the trainer's processor time for one phase of one engine: each is told once more to commit what it serves. `forming` is
the time until all have joined a new group.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch
import uvicorn
import uvloop

from benchmarks.measure import Paired, Row, bootstrap_median, print_table, write_record
from inference_contract.errors import InvalidRequest
from inference_contract.schemas import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    EngineMetrics,
    EngineState,
    Health,
    ModelCard,
)
from inference_contract.weights import (
    DType,
    InitProcessGroupRequest,
    OnUpdate,
    ParameterSpec,
    ProcessGroupStatus,
    UpdatePhase,
    WeightLayout,
    WeightUpdateRequest,
    WeightUpdateResponse,
)
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.weights.weight_receiver import WeightReceiver
from pipelinerl.roles.process import freeze_gc
from pipelinerl.system.http_service import config_of, listen
from pipelinerl.weights.broadcast.publisher import BroadcastPublisher
from pipelinerl.weights.fan_out import each
from pipelinerl.weights.publisher import Publication

#: (engines, tensors)
FLEETS: Final = ((1, 100), (4, 10), (4, 100), (4, 1_000), (4, 10_000), (16, 100), (64, 100))
QUICK: Final = ((1, 100), (4, 10), (4, 1_000), (64, 100))
_REAL_BYTES: Final = 8 * 2**20
_PER_PROCESS: Final = 16
_TOKEN: Final = "fleet"
_PATIENCE_S: Final = 120.0
_BASE_MS: Final = 5.0
_EACH_MS: Final = 0.02
_MOST_MS: Final = {64: 15.0}


def _layout(tensors: int, *, real: bool) -> WeightLayout:
    size = _REAL_BYTES // tensors if real else 1
    rows = (ParameterSpec(name=f"layers.{row}.weight", shape=(size,), dtype=DType.INT8) for row in range(tensors))
    return WeightLayout(parameters=tuple(rows))


@final
class _Engine:
    """Satisfies `Engine`, as far as updates go, and `WeightTarget`."""

    def __init__(self, layout: WeightLayout) -> None:
        self.layout = layout
        self._buffers = [np.zeros(layout.num_bytes, np.uint8) for _ in range(2)]
        self._serving = (0, 0)
        self._receiver: WeightReceiver

    async def start(self) -> None:
        self._receiver = WeightReceiver(self)

    async def close(self) -> None:
        self._receiver.close()

    def staging(self) -> Any:
        return self._buffers[1]

    def finish_staging(self) -> None:
        return None

    async def commit(self, *, version: int, epoch: int, digest: str, on_update: OnUpdate) -> float:
        self._buffers.reverse()
        self._serving = epoch, version
        return 0.0

    def serving(self) -> tuple[int, int]:
        return self._serving

    async def init_process_group(self, request: InitProcessGroupRequest) -> ProcessGroupStatus:
        return await self._receiver.init_process_group(request)

    async def request_weight_update(self, request: WeightUpdateRequest) -> WeightUpdateResponse:
        return await self._receiver.request_weight_update(request)

    async def complete(self, request: ChatCompletionRequest) -> ChatCompletion:
        raise InvalidRequest("this engine has no model")

    async def stream(self, request: ChatCompletionRequest) -> AsyncIterator[ChatCompletionChunk]:
        raise InvalidRequest("this engine has no model")
        yield  # a stream by its type

    def model_card(self) -> ModelCard:
        epoch, version = self._serving
        return ModelCard(
            id="none",
            model_version=version,
            epoch=epoch,
            context_length=1,
            layout=self.layout,
            layout_id=self.layout.layout_id,
        )

    def health(self) -> Health:
        return Health(state=EngineState.READY, epoch=self._serving[0], model_version=self._serving[1])

    def metrics(self) -> EngineMetrics:
        return EngineMetrics(epoch=self._serving[0], model_version=self._serving[1])


def _engines(ports: Connection, count: int, tensors: int, real: bool) -> None:
    """A process of `count` engines: sends their ports."""
    _open_many_files()
    torch.set_num_threads(1)
    layout = _layout(tensors, real=real)

    async def serve() -> None:
        listeners = [listen("127.0.0.1", 0) for _ in range(count)]
        engines = [_Engine(layout) for _ in listeners]
        for engine in engines:
            await engine.start()
        servers = [uvicorn.Server(config_of(create_app(engine, token=_TOKEN))) for engine in engines]
        serving = [
            asyncio.create_task(server.serve(sockets=[listener]))
            for server, listener in zip(servers, listeners, strict=True)
        ]
        while not all(server.started for server in servers):
            await asyncio.sleep(0.01)
        freeze_gc()
        ports.send([listener.getsockname()[1] for listener in listeners])
        await asyncio.gather(*serving)

    uvloop.run(serve())


def _open_many_files() -> None:
    """Every rank of a group is connected to every other."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@contextmanager
def _fleet(engines: int, tensors: int, *, real: bool) -> Iterator[list[str]]:
    """Base URLs of so many engines."""
    spawn = multiprocessing.get_context("spawn")
    urls: list[str] = []
    with ExitStack() as stack:
        for first in range(0, engines, _PER_PROCESS):
            ours, theirs = spawn.Pipe()
            count = min(_PER_PROCESS, engines - first)
            process = spawn.Process(target=_engines, args=(theirs, count, tensors, real), daemon=True)
            process.start()
            stack.callback(process.join, 10)
            stack.callback(process.kill)
            if not ours.poll(_PATIENCE_S):
                raise RuntimeError(f"the engines did not start within {_PATIENCE_S:g} s")
            urls += [f"http://127.0.0.1:{port}" for port in ours.recv()]
        yield urls


@final
class _Trainer:
    """The trainer of one fleet."""

    def __init__(self, control: EngineClient, layout: WeightLayout, engines: list[str]) -> None:
        self._publisher = BroadcastPublisher(control)
        self._layout = layout
        self._engines = tuple(engines)
        self._version, self._membership, self._digest = 0, 1, ""
        self._control = control
        whole = np.zeros(layout.num_bytes, np.int8)
        self._arrays, at = [], 0
        for parameter in layout.parameters:
            self._arrays.append((parameter.name, whole[at : at + parameter.num_bytes].reshape(parameter.shape)))
            at += parameter.num_bytes

    async def update(self) -> tuple[float, float, float]:
        """Publish the next version: seconds in all, seconds beside the broadcast, and of this process's processor."""
        self._version += 1
        publication = Publication(
            version=self._version,
            epoch=1,
            layout=self._layout,
            weights=lambda: iter(self._arrays),
            engines=self._engines,
            membership=self._membership,
            timeout_s=_PATIENCE_S,
        )
        spent = time.process_time()
        report = await self._publisher.publish(publication)
        if report.failed:
            raise RuntimeError(f"an update failed: {report.failed}")
        self._digest = report.digest
        return report.total_s, report.total_s - report.send_s, time.process_time() - spent

    async def form(self) -> float:
        """Publish to a new group: seconds until it has formed, by what this update took beyond another."""
        self._membership += 1
        _, with_forming, _ = await self.update()
        _, without, _ = await self.update()
        return with_forming - without

    async def phase(self) -> float:
        """Seconds of this process's processor for one phase of one engine."""
        again = WeightUpdateRequest(
            phase=UpdatePhase.COMMIT, version=self._version, epoch=1, digest=self._digest, timeout_s=_PATIENCE_S
        )
        spent = time.process_time()
        answers = await each(self._engines, lambda url: self._control.request_weight_update(url, again))
        if wrong := [str(answer) for answer in answers.values() if isinstance(answer, Exception)]:
            raise RuntimeError(f"a phase failed: {wrong[0]}")
        return (time.process_time() - spent) / len(self._engines)

    async def close(self) -> None:
        await self._publisher.close()


_ARMS: Final = ("real", "tiny", "control", "trainer", "plain", "engines", "phase", "forming")


async def _measure(engines: int, tensors: int, rounds: int) -> dict[str, Any]:
    """Medians of one fleet, in milliseconds, and the paired ratios."""
    with (
        _fleet(engines, tensors, real=True) as real_urls,
        _fleet(engines, tensors, real=False) as tiny_urls,
    ):
        async with EngineClient(token=_TOKEN) as client:
            real = _Trainer(client, _layout(tensors, real=True), real_urls)
            tiny = _Trainer(client, _layout(tensors, real=False), tiny_urls)
            forming, _, _ = await tiny.update()
            await real.update()
            freeze_gc()
            samples: dict[str, list[float]] = {name: [] for name in _ARMS}
            for number in range(-2, rounds):
                first, second = (real, tiny) if number % 2 else (tiny, real)
                timed, spent = dict[int, tuple[float, float, float]](), 0.0
                for one in (first, second):
                    before = _spent_by_engines()
                    timed[id(one)] = await one.update()
                    spent = _spent_by_engines() - before if one is tiny else spent
                plain = await _asked_twice(client, tiny_urls)
                more = plain, spent, await tiny.phase(), await tiny.form()
                if number >= 0:
                    for name, value in zip(_ARMS, (timed[id(real)][0], *timed[id(tiny)], *more), strict=True):
                        samples[name].append(1e3 * value)
            await real.close()
            await tiny.close()
    timings = Paired({name: tuple(values) for name, values in samples.items()})
    return {
        "engines": engines,
        "tensors": tensors,
        "first_with_joining_ms": 1e3 * forming,
        "samples": samples,
        **{f"{name}_ms": bootstrap_median(samples[name]).as_dict() for name in _ARMS},
        "mean_engines_ms": sum(samples["engines"]) / len(samples["engines"]),
        "real_over_tiny": timings.ratio("real", "tiny").as_dict(),
        "control_over_plain": timings.ratio("control", "plain").as_dict(),
    }


def _spent_by_engines() -> float:
    """Processor seconds of all engines so far."""
    ticks = 0
    for process in multiprocessing.active_children():
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def _asked_twice(client: EngineClient, urls: list[str]) -> float:
    """Seconds until every engine has answered two requests that ask nothing of it, one after the other."""
    began = time.perf_counter()
    for _ in range(2):
        await asyncio.gather(*(client.health(url) for url in urls))
    return time.perf_counter() - began


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure every fleet, print, and write the record."""
    torch.set_num_threads(1)
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")  # as the launcher does: see docs/clusters.md
    _open_many_files()
    fleets = [uvloop.run(_measure(*fleet, rounds=3 if quick else 31)) for fleet in (QUICK if quick else FLEETS)]
    rows = []
    for fleet in fleets:
        name, engines = f"{fleet['engines']} engines, {fleet['tensors']} tensors", fleet["engines"]
        target = _MOST_MS.get(engines, _BASE_MS + _EACH_MS * engines)
        control, forming = fleet["control_ms"]["median"], fleet["forming_ms"]["median"]
        phase = 1e3 * fleet["phase_ms"]["median"]
        rows += [
            Row(f"{name}: control, ms", control, f"<= {target:.3g}", control <= target),
            Row(f"{name}: control ÷ two plain requests", fleet["control_over_plain"]["median"]),
            Row(f"{name}: trainer's processor, ms", fleet["trainer_ms"]["median"]),
            Row(f"{name}: engines' processor, ms", fleet["mean_engines_ms"]),
            Row(f"{name}: trainer's processor for a phase of an engine, µs", phase, "<= 30", phase <= 30),
            Row(f"{name}: a new group formed, ms", forming, "<= 150", forming <= 150),
            Row(f"{name}: 1-byte update, ms", fleet["tiny_ms"]["median"]),
            Row(f"{name}: real ÷ 1-byte", fleet["real_over_tiny"]["median"]),
        ]
    print_table("fleet: updates beside their bytes", rows)
    payload = {"fleets": fleets}
    if not quick:
        write_record("fleet", payload)
    return payload
