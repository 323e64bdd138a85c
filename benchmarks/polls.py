"""What it costs the controller to know how its engines are: polls, as they are, against heartbeats that carry the same.

The controller, the stream server and the engines (mocks behind real HTTP servers) are processes of their own; nothing
else happens. Only processor time is counted, which other work on the machine does not change much.

    at rest     the controller's whole process, per second: polls, offers, its own ticks, the event log
    poll        asking an engine for `/metrics`, reading the answer and taking it in, as the controller does
    offer       an engine says that it is there, and nothing new: what a heartbeat by request would cost at least
    heartbeat   an engine's state as an entry of a stream, of which the controller reads as many as have come

`polls` and `heartbeats` put them together: so many polls a second as the controller makes of that fleet, and a
heartbeat of every engine each second, which is what polls give of a small fleet.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
import uvloop

from benchmarks.measure import Row, bootstrap_median, print_table, write_record
from benchmarks.mock_engine import Pace
from benchmarks.mock_fleet import MockFleet, mock_fleet, open_many_files, processor_seconds
from benchmarks.scale_roles import controller_process
from inference_contract.schemas import EngineMetrics
from pipelinerl.controller.client import AsyncControllerClient, ControllerClient
from pipelinerl.controller.decisions.engine_watch import POLLS_PER_S, EngineWatch
from pipelinerl.controller.routes import OFFER_S, OFFERS_AT_ONCE
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.streams.embedded_redis import EmbeddedRedis
from pipelinerl.streams.open_stream import open_stream
from pipelinerl.streams.stream import START

FLEETS: Final = (64, 1024)
QUICK: Final = (16,)
_TOKEN: Final = "polls"
_PATIENCE_S: Final = 120.0
_SPAWN: Final = multiprocessing.get_context("spawn")
_HEARTBEATS: Final = "heartbeats"


@contextmanager
def _processes(engines: int, folder: Path) -> Iterator[tuple[Any, str, MockFleet, str]]:
    """The controller's process and URL, engines that have joined it, and the stream server's URL."""
    with EmbeddedRedis(folder / "redis") as redis:
        ours, theirs = _SPAWN.Pipe()
        arguments = (theirs, Path("tiny"), folder, redis.url, _TOKEN)
        controller = _SPAWN.Process(target=controller_process, args=arguments, daemon=True)
        controller.start()
        theirs.close()
        try:
            if not ours.poll(_PATIENCE_S):
                raise RuntimeError(f"the controller did not start within {_PATIENCE_S:g} s")
            url, pace = ours.recv(), Pace(median_s=1.0)
            with mock_fleet(engines, pace=pace, controller_url=url, redis_url=redis.url, token=_TOKEN) as fleet:
                _await_engines(url, engines)
                yield controller, url, fleet, redis.url
        finally:
            controller.kill()
            controller.join(10)


def _await_engines(url: str, engines: int) -> None:
    with ControllerClient(url, _TOKEN) as client:
        deadline = time.monotonic() + _PATIENCE_S
        while (come := len(client.engines().engines)) < engines:
            if time.monotonic() > deadline:
                raise RuntimeError(f"{come} of {engines} engines joined within {_PATIENCE_S:g} s")
            time.sleep(0.2)


def _at_rest(controller: Any, seconds: float) -> float:
    """Milliseconds of the controller's processor per second."""
    before, began = processor_seconds(controller.pid), time.monotonic()
    time.sleep(seconds)
    return 1e3 * (processor_seconds(controller.pid) - before) / (time.monotonic() - began)


async def _poll_us(urls: Sequence[str], rounds: int) -> list[float]:
    """Microseconds of this process for a poll, round by round."""
    watch, found = EngineWatch(), list[float]()
    async with EngineClient(token=_TOKEN) as client:

        async def poll(url: str) -> None:
            told = await client.metrics(url)
            known = {name: told[name] for name in EngineMetrics.model_fields if name in told}
            watch.answered(url, EngineMetrics.model_validate(known), time.monotonic())

        for number in range(-2, rounds):
            spent = time.process_time()
            async with asyncio.TaskGroup() as asking:
                for url in urls:
                    asking.create_task(poll(url))
            if number >= 0:
                found.append(1e6 * (time.process_time() - spent) / len(urls))
    return found


async def _heartbeat_us(redis_url: str, urls: Sequence[str], rounds: int) -> list[float]:
    """Microseconds of this process for a heartbeat that is read from a stream, round by round."""
    stream, watch, found, offset = await open_stream(redis_url, namespace="polls"), EngineWatch(), list[float](), START
    try:
        for number in range(-2, rounds):
            told = [msgspec.msgpack.encode((url, EngineMetrics(slots=8).model_dump())) for url in urls]
            await stream.append(_HEARTBEATS, told)
            spent = time.process_time()
            for entry in await stream.read({_HEARTBEATS: offset}, count=len(urls), block_s=_PATIENCE_S):
                offset = entry.entry_id
                url, metrics = msgspec.msgpack.decode(entry.payload)
                watch.answered(url, EngineMetrics.model_validate(metrics), time.monotonic())
            if number >= 0:
                found.append(1e6 * (time.process_time() - spent) / len(urls))
            await stream.trim(_HEARTBEATS, before=offset)
    finally:
        await stream.close()
    return found


async def _offer_us(controller: Any, url: str, engine: str, count: int, *, rest_ms: float) -> float:
    """Microseconds of the controller's processor, beyond what it spends at rest, for an offer that says nothing new."""
    async with AsyncControllerClient(url, _TOKEN) as client:

        async def offer() -> None:
            await client.register_engine(engine, incarnation="polls", name="engine-0", type="mock")

        await offer()  # another life of it; the next say nothing new
        before, began = processor_seconds(controller.pid), time.monotonic()
        for _ in range(count):
            await offer()
        spent, took = processor_seconds(controller.pid) - before, time.monotonic() - began
    return 1e6 * (spent - 1e-3 * rest_ms * took) / count


def _measure(engines: int, *, quick: bool) -> dict[str, Any]:
    with (
        TemporaryDirectory(prefix="polls-") as folder,
        _processes(engines, Path(folder)) as (controller, url, fleet, redis_url),
    ):
        time.sleep(1.0 if quick else 5.0)
        rest_ms = _at_rest(controller, 2.0 if quick else 20.0)
        rounds, few = 5 if quick else 31, fleet.urls[:POLLS_PER_S]
        polls = bootstrap_median(uvloop.run(_poll_us(few, rounds)))
        heartbeats = bootstrap_median(uvloop.run(_heartbeat_us(redis_url, fleet.urls, rounds)))
        fleet.die([0])  # so that it says nothing itself
        count = 200 if quick else 2000
        offer = uvloop.run(_offer_us(controller, url, fleet.urls[0], count, rest_ms=rest_ms))
    return {
        "engines": engines,
        "at_rest_ms_per_s": rest_ms,
        "poll_us": polls.as_dict(),
        "heartbeat_us": heartbeats.as_dict(),
        "offer_us": offer,
        "polls_ms_per_s": min(engines, POLLS_PER_S) * polls.median / 1e3,
        "offers_ms_per_s": min(engines / OFFER_S, OFFERS_AT_ONCE / OFFER_S) * offer / 1e3,
        "heartbeats_ms_per_s": engines * heartbeats.median / 1e3,
    }


def _rows(found: Mapping[str, Any]) -> list[Row]:
    name = f"{found['engines']} engines"
    return [
        Row(f"{name}: controller's processor at rest, ms per second", found["at_rest_ms_per_s"]),
        Row(f"{name}: … of which polls", found["polls_ms_per_s"]),
        Row(f"{name}: … of which offers", found["offers_ms_per_s"]),
        Row(f"{name}: heartbeats by the stream in place of polls, ms per second", found["heartbeats_ms_per_s"]),
        Row(f"{name}: a poll, µs", found["poll_us"]["median"]),
        Row(f"{name}: an offer, µs", found["offer_us"]),
        Row(f"{name}: a heartbeat by the stream, µs", found["heartbeat_us"]["median"]),
    ]


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure every fleet, print, and write the record."""
    open_many_files()
    fleets = [_measure(engines, quick=quick) for engines in (QUICK if quick else FLEETS)]
    rows = [row for found in fleets for row in _rows(found)]
    print_table("polls: what the controller spends to know its engines", rows)
    payload = {"fleets": fleets}
    if not quick:
        write_record("polls", payload)
    return payload
