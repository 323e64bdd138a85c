"""What the control plane of 128 to 1,024 engines carries: rollouts per second, and what each costs whom.

Engines are mocks (`mock_engine.py`): real HTTP servers whose sampling is a wait, so that two processors can carry a
thousand of them. The controller, the actors, the stream server, the parameter server and what publishes are the real
ones, in processes of their own; the trainer computes nothing. Each fleet has as many groups of eight rollouts in flight
as engines. All pacing is switched off (k = inf), and no weights are published while rollouts are counted.

    rollouts/s        trained in the window, after answers have ceased to end in waves
    dispatch          from an order's append to the stream `prompts` until an engine has its request
    processor         of all processes of a kind, for each rollout
    announcement      at rest, P99 over the engines: from the first request on until an engine has answered PREPARE;
                      from the entry of the stream on until an engine has it; against as many requests that ask nothing.
                      No engine fetches anything: what it would take is a wait, too
    deaths            5 % of the engines a minute die without a word, for a while; then everything that was issued until
                      then must have been trained
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np
import uvloop

from benchmarks.measure import Row, print_table, write_record
from benchmarks.mock_engine import LAYOUT, Pace
from benchmarks.mock_fleet import MockFleet, mock_fleet, open_many_files, processor_seconds
from benchmarks.scale_roles import StandInTrainer, actor_process, controller_process, parameter_server_process
from inference_contract import routes
from inference_contract.weights import Transport, UpdatePhase, WeightUpdateRequest
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.observability.events import read_events
from pipelinerl.rng import generator, key
from pipelinerl.streams.embedded_redis import EmbeddedRedis
from pipelinerl.streams.open_stream import open_stream
from pipelinerl.system.http_client import post_connections
from pipelinerl.system.ports import free_ports
from pipelinerl.training.publish.stream_announcer import StreamAnnouncer
from pipelinerl.training.rollouts.admission import GroupOutcome
from pipelinerl.weights.parameter_server.publisher import PullPublisher
from pipelinerl.weights.parameter_server.upload import Uploader

FLEETS: Final = (128, 256, 512, 1024)
QUICK: Final = (16, 32)
ACTORS: Final = 4
GROUP: Final = 8
STEP: Final = 256
#: How long answers take; and weights, while which an engine that has heard of them keeps no processor busy.
PACE: Final = Pace(median_s=8.0, spread=0.4, full=0.002, fetch_s=0.2)
_PATIENCE_S: Final = 300.0
_DYING_A_MINUTE: Final = 0.05
_ROUNDS: Final = 9
_RECIPE: Final = """
[run]
name = "scale"
steps = 100000000
[model]
path = "shipped:tiny"
[engine]
type = "bigram"
count = {engines}
[trainer]
type = "bigram"
[[domains]]
name = "sums"
source = "addition"
verifier = "benchmarks.scale_roles:EveryOther"
[objective]
preset = "pipelinerl"
[sampling]
group_size = {group}
max_tokens = 16
[training]
rollouts_per_step = {step}
no_signal = "train"
[staleness]
j = 100000000
k = inf
[actor]
count = {actors}
groups_in_flight = {held}
stream_interval_s = {interval}
[streams]
max_groups = {engines}
[evaluation]
problems = 0
[samples]
log = "off"
[checkpoint]
interval_steps = 100000000
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Seconds: until what is counted begins, for how long it is, and for how long engines die."""

    pace: Pace
    warm_s: float
    window_s: float
    dying_s: float


_WHOLE: Final = _Times(pace=PACE, warm_s=20.0, window_s=24.0, dying_s=60.0)
_BRIEF: Final = _Times(pace=Pace(median_s=0.5, spread=0.4, full=0.002), warm_s=2.0, window_s=3.0, dying_s=3.0)
_SPAWN: Final = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class _Run:
    """One fleet, and all that drives it."""

    fleet: MockFleet
    controller: Any
    actors: Sequence[Any]
    issued: Callable[[], Mapping[int, float]]
    redis: EmbeddedRedis
    server_url: str
    token: str
    folder: Path

    def spent(self) -> dict[str, float]:
        """Processor seconds of each kind of process so far."""
        return {
            "controller": processor_seconds(self.controller.pid),
            "actors": sum(processor_seconds(actor.pid) for actor in self.actors),
            "streams": processor_seconds(self.redis.pid),
            "mocks": self.fleet.processor_seconds(),
            "trainer": processor_seconds(os.getpid()),
        }


@contextmanager
def _processes(engines: int, times: _Times, folder: Path) -> Iterator[_Run]:
    recipe, token, started = folder / "scale.toml", f"{key(os.getpid(), 'scale'):x}", list[Any]()
    held = -(-3 * engines // (2 * ACTORS))
    recipe.write_text(
        _RECIPE.format(
            engines=engines, group=GROUP, step=min(STEP, engines * GROUP // 4), actors=ACTORS, held=held,
            interval=times.pace.median_s / 3,
        )
    )  # fmt: skip

    def start(target: Callable[..., None], *arguments: Any) -> Any:
        process = _SPAWN.Process(target=target, args=arguments, daemon=True)
        process.start()
        started.append(process)
        return process

    try:
        with EmbeddedRedis(folder / "redis") as redis:
            asked, theirs = _SPAWN.Pipe()
            controller = start(controller_process, theirs, recipe, folder, redis.url, token)
            theirs.close()  # so that its end is noticed
            (port,) = free_ports(1)
            start(parameter_server_process, recipe, folder, port, token)
            url = _heard(asked)
            with mock_fleet(engines, pace=times.pace, controller_url=url, redis_url=redis.url, token=token) as fleet:
                actors = [
                    start(actor_process, recipe, folder, f"actor-{number}", redis.url, url, token)
                    for number in range(ACTORS)
                ]

                def issued() -> Mapping[int, float]:
                    asked.send("issued")
                    found: Mapping[int, float] = _heard(asked)
                    return found

                yield _Run(fleet, controller, actors, issued, redis, f"http://127.0.0.1:{port}", token, folder)
    finally:
        for process in started:
            process.kill()
            process.join(10)


def _heard(pipe: Any) -> Any:
    if not pipe.poll(_PATIENCE_S):
        raise RuntimeError(f"the controller said nothing for {_PATIENCE_S:g} s")
    return pipe.recv()


async def _until(happened: Callable[[], bool], what: str, training: asyncio.Task[None]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not happened():
        if training.done():
            training.result()
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not come about within {_PATIENCE_S:g} s")
        await asyncio.sleep(0.05)


async def _measure(run: _Run, engines: int, times: _Times, *, dying: bool) -> dict[str, Any]:
    stream = await open_stream(run.redis.url, namespace="scale")
    async with EngineClient(token=run.token) as client:
        announcer = StreamAnnouncer(stream, quiet_s=_PATIENCE_S)
        publisher = PullPublisher(client, Uploader([run.server_url], token=run.token), announcer=announcer)
        trainer = StandInTrainer(stream, publisher, rollouts_per_step=min(STEP, engines * GROUP // 4))
        training = asyncio.create_task(trainer.run())
        try:
            began = time.monotonic()
            await _until(lambda: len(trainer.steps) > 0, f"the first step of {engines} engines", training)
            joined_s = time.monotonic() - began
            await asyncio.sleep(times.warm_s)
            found = {"engines": engines, "first_step_s": joined_s, **await _window(run, trainer, times)}
            if dying:
                found["deaths"] = await _deaths(run, trainer, training, times, engines)
        finally:
            training.cancel()
            await asyncio.gather(training, return_exceptions=True)
        for actor in run.actors:
            actor.terminate()
            await asyncio.to_thread(actor.join, 20)
        if not dying:
            found["announcement"] = await _announcement(run, client, StreamAnnouncer(stream, quiet_s=_PATIENCE_S))
        await trainer.close()
    await stream.close()
    return found


async def _window(run: _Run, trainer: StandInTrainer, times: _Times) -> dict[str, Any]:
    """Rates, costs and dispatch within a window."""
    before, began, steps = run.spent(), time.monotonic(), len(trainer.steps)
    await asyncio.sleep(times.window_s)
    after, ended = run.spent(), time.monotonic()
    rollouts = sum(count for _, count in trainer.steps[steps:])
    issued, seen = await asyncio.to_thread(run.issued), await asyncio.to_thread(run.fleet.seen)
    waits = [1e3 * (seen[seed] - at) for seed, at in issued.items() if began <= at <= ended - 1.0 and seed in seen]
    never = sum(1 for seed, at in issued.items() if began <= at <= ended - 1.0 and seed not in seen)
    return {
        "rollouts_per_s": rollouts / (ended - began),
        "dispatch_ms": {"p50": _at(waits, 50), "p99": _at(waits, 99), "orders": len(waits), "never": never},
        "spent_us": {kind: 1e6 * (after[kind] - before[kind]) / max(rollouts, 1) for kind in before},
        "processors_busy": sum(after[kind] - before[kind] for kind in before) / (ended - began),
    }


async def _deaths(
    run: _Run, trainer: StandInTrainer, training: asyncio.Task[None], times: _Times, engines: int
) -> dict[str, Any]:
    """Engines die, one after the other; then all that was issued until the last has died must be trained."""
    count = max(1, round(engines * _DYING_A_MINUTE * times.dying_s / 60.0))
    order = generator(0, "deaths").permutation(engines)[:count].tolist()
    trained = trainer.ledger.counts[GroupOutcome.TRAINED]
    began = time.monotonic()
    for number in order:
        await asyncio.to_thread(run.fleet.die, [number])
        await asyncio.sleep(times.dying_s / count)
    rate = (trainer.ledger.counts[GroupOutcome.TRAINED] - trained) * GROUP / (time.monotonic() - began)
    last = len(await asyncio.to_thread(run.issued))
    await _until(lambda: trainer.ledger.frontier >= last, "the end of every order", training)
    events = list(read_events(run.folder / "events.jsonl"))
    handed = sum(event["kind"] == "group_handed_over" for event in events)
    failed = sum(event["kind"] == "group_failed" for event in events)
    fates = {str(fate): number for fate, number in trainer.ledger.counts.items()}
    return {
        "died": count,
        "orders": last,
        "lost": failed,
        "handed_over": handed,
        "fates": fates,
        "rollouts_per_s": rate,
    }


async def _announcement(run: _Run, client: EngineClient, announcer: StreamAnnouncer) -> dict[str, Any]:
    """Announce versions by requests and by the stream, and ask as many requests that ask nothing, in turn."""
    posts = post_connections(token=run.token, keep_alive_s=30.0)
    samples: dict[str, list[float]] = {arm: [] for arm in ("empty", "requests", "stream", "taken")}
    version = 10**6

    async def nothing(url: str) -> None:
        await posts.get(url, routes.HEALTH, timeout_s=_PATIENCE_S)

    try:
        for number in range(-1, _ROUNDS):
            prepare = WeightUpdateRequest(
                phase=UpdatePhase.PREPARE, version=version + number, epoch=1, transport=Transport.PULL,
                sources=(run.server_url,), layout_id=LAYOUT.layout_id, digest="0" * 32,
            )  # fmt: skip

            async def prepared(url: str, request: WeightUpdateRequest = prepare) -> None:
                await client.request_weight_update(url, request)

            arms = {
                "empty": await _each(run.fleet.urls, nothing),
                "requests": await _each(run.fleet.urls, prepared),
                **await _by_stream(run, announcer, prepare),
            }
            if number >= 0:
                for arm, values in arms.items():
                    samples[arm].append(_at(values, 99))
    finally:
        await posts.close()
    return {f"{arm}_p99_ms": values for arm, values in samples.items()}


async def _by_stream(run: _Run, announcer: StreamAnnouncer, prepare: WeightUpdateRequest) -> dict[str, list[float]]:
    """Milliseconds until each engine has the announcement, and until all have said that they serve the version."""
    began = time.monotonic()
    answers = await announcer.tell(prepare, run.fleet.urls, left_out=(), deadline=began + _PATIENCE_S)
    taken = 1e3 * (time.monotonic() - began)
    failed = [str(answer) for answer in answers.values() if isinstance(answer, Exception)]
    if failed or len(answers) < len(run.fleet.urls):
        raise RuntimeError(f"{len(answers)} of {len(run.fleet.urls)} engines took a version: {failed[:1]}")
    heard = await asyncio.to_thread(run.fleet.announced)
    return {"stream": [1e3 * (at - began) for at in heard if at is not None], "taken": [taken]}


async def _each(urls: Sequence[str], call: Callable[[str], Awaitable[None]]) -> list[float]:
    """Milliseconds until each has answered, all being asked at once."""
    began = time.perf_counter()

    async def timed(url: str) -> float:
        await call(url)
        return 1e3 * (time.perf_counter() - began)

    return list(await asyncio.gather(*(timed(url) for url in urls)))


def _at(values: Sequence[float], percent: float) -> float:
    return float(np.percentile(values, percent)) if values else 0.0


def _fleet(engines: int, times: _Times, *, dying: bool = False) -> dict[str, Any]:
    others = os.getloadavg()[0]
    with TemporaryDirectory(prefix="scale-") as folder, _processes(engines, times, Path(folder)) as run:
        found = {"load_before": others, **uvloop.run(_measure(run, engines, times, dying=dying))}
        with suppress(OSError):
            found["errors"] = [
                line
                for path in sorted(Path(folder).glob("*.out"))
                for line in path.read_text().splitlines()
                if '"level": "error"' in line.lower() or "Traceback" in line
            ][:5]
        return found


def _rows(found: Mapping[str, Any]) -> list[Row]:
    name, spent, dispatch = f"{found['engines']} engines", found["spent_us"], found["dispatch_ms"]
    rows = [
        Row(f"{name}: load of the machine before, for 1 minute", found["load_before"]),
        Row(f"{name}: rollouts/s", found["rollouts_per_s"]),
        Row(f"{name}: dispatch P50, ms", dispatch["p50"]),
        Row(f"{name}: dispatch P99, ms", dispatch["p99"], "< 100", dispatch["p99"] < 100),
        Row(
            f"{name}: controller, µs of processor a rollout", spent["controller"], "<= 100", spent["controller"] <= 100
        ),
    ]
    rows += [
        Row(f"{name}: {kind}, µs of processor a rollout", spent[kind])
        for kind in ("actors", "streams", "trainer", "mocks")
    ]
    rows.append(Row(f"{name}: processors busy", found["processors_busy"]))
    if "announcement" in found:
        told = found["announcement"]
        empty, by_requests, by_stream, taken = (
            float(np.median(told[f"{arm}_p99_ms"])) for arm in ("empty", "requests", "stream", "taken")
        )
        beyond, stream_beyond = (
            float(np.median(np.subtract(told[f"{arm}_p99_ms"], told["empty_p99_ms"]))) for arm in ("requests", "stream")
        )
        rows += [
            Row(f"{name}: as many empty requests, P99, ms", empty),
            Row(f"{name}: version announced by requests, P99, ms", by_requests),
            Row(f"{name}: … beyond empty requests, ms", beyond, "< 50", beyond < 50),
            Row(f"{name}: version announced by the stream, P99, ms", by_stream),
            Row(f"{name}: … beyond empty requests, ms", stream_beyond, "< 50", stream_beyond < 50),
            Row(f"{name}: … and taken by all, ms", taken),
        ]
    if "deaths" in found:
        deaths = found["deaths"]
        lost = deaths["lost"] + deaths["fates"]["failed"] + deaths["fates"]["stale"]
        rows += [
            Row(f"{name}, 5 % dying a minute: died", deaths["died"]),
            Row(f"{name}, 5 % dying a minute: groups handed over", deaths["handed_over"]),
            Row(f"{name}, 5 % dying a minute: lost of {deaths['orders']} orders", lost, "0", lost == 0),
            Row(f"{name}, 5 % dying a minute: rollouts/s", deaths["rollouts_per_s"]),
        ]
    return rows


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure every fleet, and print and record each as it comes: all take a quarter of an hour."""
    open_many_files()
    sizes, times = (QUICK, _BRIEF) if quick else (FLEETS, _WHOLE)
    payload: dict[str, Any] = {"fleets": []}
    for engines in sizes:
        found = _fleet(engines, times)
        payload["fleets"].append(found)
        _tell(f"scale: the control plane of {engines} engines", _rows(found), payload, quick=quick)
    first, last = payload["fleets"][0], payload["fleets"][-1]
    ratio, wanted = last["rollouts_per_s"] / first["rollouts_per_s"], 0.95 * sizes[-1] / sizes[0]
    payload |= {"ratio": ratio, "dying": _fleet(sizes[-1], times, dying=True)}
    compared = Row(f"{sizes[-1]} ÷ {sizes[0]} engines, rollouts/s", ratio, f">= {wanted:g}", ratio >= wanted)
    _tell("scale: many engines, of which some die", [*_rows(payload["dying"]), compared], payload, quick=quick)
    return payload


def _tell(title: str, rows: Sequence[Row], payload: Mapping[str, Any], *, quick: bool) -> None:
    print_table(title, rows)
    if not quick:
        write_record("scale", payload)


if __name__ == "__main__":
    run(quick="--quick" in sys.argv)
