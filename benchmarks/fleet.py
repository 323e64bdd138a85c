"""Measure how the control messages of a weight update scale with the number of engines and of tensors.

An engine of this benchmark has everything that an update passes through (HTTP server, receiver, endpoint in a gloo
group) but no model; sixteen engines share a process. Tensors have one byte each, so nearly all time is control.
`control` is the time of an update outside the broadcast: PREPARE and COMMIT, each sent to all engines concurrently.
`forming` is the time until all engines have joined a new group. On two cores, 64 engines compete for processor time; on
machines of their own they would not.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import torch
import uvicorn
import uvloop

from benchmarks.measure import Row, bootstrap_median, report
from benchmarks.processes import open_many_files, spawned
from benchmarks.served_engine import publish
from inference_contract import schemas
from inference_contract.errors import InvalidRequest
from inference_contract.weights import DType, OnUpdate, ParameterSpec, WeightLayout
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.weights.weight_receiver import WeightReceiver
from pipelinerl.roles.process import freeze_gc
from pipelinerl.system.http_service import config_of, listen
from pipelinerl.weights.broadcast.publisher import BroadcastPublisher

#: Fleets to measure, as pairs of the number of engines and the number of tensors.
FLEETS: Final = ((1, 100), (4, 10), (4, 100), (4, 1_000), (4, 10_000), (16, 100), (64, 100))
QUICK: Final = ((1, 100), (4, 10), (4, 1_000), (64, 100))
_PER_PROCESS: Final = 16
_TOKEN: Final = "fleet"
_BASE_MS: Final = 5.0
_EACH_MS: Final = 0.02
_MOST_MS: Final = {64: 15.0}


def _layout(tensors: int) -> WeightLayout:
    rows = (ParameterSpec(name=f"layers.{row}.weight", shape=(1,), dtype=DType.INT8) for row in range(tensors))
    return WeightLayout(parameters=tuple(rows))


class _Engine:
    def __init__(self, layout: WeightLayout) -> None:
        self.layout = layout
        self._buffers = [np.zeros(layout.num_bytes, np.uint8) for _ in range(2)]
        self._serving = (0, 0)
        receiver = WeightReceiver(self)
        self.init_process_group = receiver.init_process_group
        self.request_weight_update = receiver.request_weight_update

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def staging(self) -> Any:
        return self._buffers[1]

    def finish_staging(self) -> None: ...

    async def commit(self, *, version: int, epoch: int, on_update: OnUpdate) -> float:
        self._buffers.reverse()
        self._serving = epoch, version
        return 0.0

    def serving(self) -> tuple[int, int]:
        return self._serving

    async def complete(self, request: schemas.ChatCompletionRequest) -> schemas.ChatCompletion:
        raise InvalidRequest("this engine has no model")

    def stream(self, request: schemas.ChatCompletionRequest) -> AsyncIterator[schemas.ChatCompletionChunk]:
        raise InvalidRequest("this engine has no model")

    def model_card(self) -> schemas.ModelCard:
        epoch, version = self._serving
        return schemas.ModelCard(
            id="none",
            model_version=version,
            epoch=epoch,
            context_length=1,
            layout=self.layout,
            layout_id=self.layout.layout_id,
        )

    def health(self) -> schemas.Health:
        return schemas.Health(state=schemas.EngineState.READY, epoch=self._serving[0], model_version=self._serving[1])

    def metrics(self) -> schemas.EngineMetrics:
        return schemas.EngineMetrics(epoch=self._serving[0], model_version=self._serving[1])


def _engines(count: int, tensors: int, ports: Connection) -> None:
    open_many_files()
    torch.set_num_threads(1)
    layout = _layout(tensors)

    async def serve() -> None:
        listeners = [listen("127.0.0.1", 0) for _ in range(count)]
        servers = [uvicorn.Server(config_of(create_app(_Engine(layout), token=_TOKEN))) for _ in listeners]
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


@contextmanager
def _fleet(engines: int, tensors: int) -> Iterator[list[str]]:
    with ExitStack() as stack:
        ports: list[int] = []
        for first in range(0, engines, _PER_PROCESS):
            count = min(_PER_PROCESS, engines - first)
            ports += stack.enter_context(spawned(_engines, count, tensors)).first
        yield [f"http://127.0.0.1:{port}" for port in ports]


async def _measure(engines: int, tensors: int, rounds: int) -> dict[str, Any]:
    layout, versions, taken = _layout(tensors), itertools.count(1), list[tuple[float, float]]()
    bytes_ = np.zeros(layout.num_bytes, np.int8)
    weights = [(parameter.name, bytes_[at : at + 1]) for at, parameter in enumerate(layout.parameters)]
    with _fleet(engines, tensors) as urls:
        async with EngineClient(token=_TOKEN) as client:
            publisher = BroadcastPublisher(client)

            async def control_s(membership: int) -> float:
                """Publish the next version to group number `membership`; return the seconds outside the broadcast."""
                report = await publish(
                    publisher, next(versions), layout, lambda: iter(weights), urls, membership=membership
                )
                return report.total_s - report.send_s

            await control_s(1)
            freeze_gc()
            for membership in range(1, rounds + 3):
                control = await control_s(membership)
                # A new membership makes the next update form a new group.
                forming = await control_s(membership + 1) - await control_s(membership + 1)
                taken.append((control, forming))
            await publisher.close()
    milliseconds = 1e3 * np.array(taken[2:]).T  # without two rounds of warm-up
    samples = dict(zip(("control", "forming"), milliseconds.tolist(), strict=True))
    medians = {f"{name}_ms": bootstrap_median(values).as_dict() for name, values in samples.items()}
    return {"engines": engines, "tensors": tensors, "samples": samples, **medians}


def run(quick: bool = False) -> None:
    """Measure every fleet, print the table and, unless `quick`, write the record."""
    torch.set_num_threads(1)
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")  # as the launcher sets it: see docs/use/clusters.md
    open_many_files()
    fleets = [uvloop.run(_measure(*fleet, rounds=3 if quick else 31)) for fleet in (QUICK if quick else FLEETS)]
    rows = []
    for fleet in fleets:
        name, engines = f"{fleet['engines']} engines, {fleet['tensors']} tensors", fleet["engines"]
        target = _MOST_MS.get(engines, _BASE_MS + _EACH_MS * engines)
        control, forming = fleet["control_ms"]["median"], fleet["forming_ms"]["median"]
        rows += [
            Row(f"{name}: control, ms", control, f"<= {target:.3g}", control <= target),
            Row(f"{name}: forming a new group, ms", forming, "<= 150", forming <= 150),
        ]
    report("fleet", rows, {"fleets": fleets}, quick=quick, title="fleet: the control part of an update")
