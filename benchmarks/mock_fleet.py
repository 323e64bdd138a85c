"""A fleet of mock engines in a few processes, each engine behind the real server at a port of its own.

with mock_fleet(1024, pace=Pace(median_s=8.0), controller_url=url, redis_url=redis, token=token) as fleet:
    …                               # they offer themselves to the controller, and follow announcements
    fleet.die([3, 17])              # their ports are closed, and every connection is cut, whatever is under way
    seen = fleet.seen()             # when each order, by its seed, first came to an engine
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import resource
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, final

import uvicorn
import uvloop

from benchmarks.mock_engine import MockEngine, Pace
from pipelinerl.controller.client import AsyncControllerClient
from pipelinerl.controller.routes import OFFER_S
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.weights.announced_updates import AnnouncedUpdates
from pipelinerl.errors import UserError
from pipelinerl.streams.open_stream import open_stream
from pipelinerl.system.http_service import config_of, listen

_PER_PROCESS: Final = 128
_PATIENCE_S: Final = 120.0
_STOP: Final = "stop"
_SEEN: Final = "seen"
_ANNOUNCED: Final = "announced"


def open_many_files() -> None:
    """Each actor has a connection to each engine."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def end_with_parent() -> None:
    """This process, which multiprocessing has started, outlives its parent by nothing, however that ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def reply(asked: Connection, answer: Any) -> None:
    """Send the whole answer. A loop that watches a pipe makes its end one that breaks off where a buffer is full."""
    os.set_blocking(asked.fileno(), True)
    try:
        asked.send(answer)
    finally:
        os.set_blocking(asked.fileno(), False)


def processor_seconds(pid: int) -> float:
    """What a process has spent so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@final
class _Served:
    """The engines of one process, and what its parent asks of them."""

    def __init__(self, first: int, count: int, pace: Pace, token: str) -> None:
        self._arrivals: dict[int, float] = {}
        self._engines = [MockEngine(first + place, pace, self._note) for place in range(count)]
        self._listeners = [listen("127.0.0.1", 0) for _ in self._engines]
        self._ports = [listener.getsockname()[1] for listener in self._listeners]
        self.urls = [f"http://127.0.0.1:{port}" for port in self._ports]
        self._first = first
        self._place_of = {port: place for place, port in enumerate(self._ports)}
        self._apps = [create_app(engine, token=token) for engine in self._engines]

        async def route(scope: Any, receive: Any, send: Any) -> None:
            await self._apps[self._place_of[scope["server"][1]]](scope, receive, send)

        self._server = uvicorn.Server(config_of(route))
        self._dead: set[int] = set()
        self._following: list[asyncio.Task[None]] = []

    def _note(self, seed: int, at: float) -> None:
        self._arrivals.setdefault(seed, at)

    async def serve(self, asked: Connection, controller_url: str, redis_url: str, token: str) -> None:
        """Until the parent says stop."""
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        serving = asyncio.create_task(self._server.serve(sockets=self._listeners))
        while not self._server.started:
            await asyncio.sleep(0.01)
        asked.send(self.urls)
        loop.add_reader(asked.fileno(), lambda: self._answer(asked, over))
        async with AsyncControllerClient(controller_url, token) as controller:
            places = range(len(self._engines))
            self._following = [asyncio.create_task(self._follow(redis_url, place)) for place in places]
            speaking = [*self._following, *(asyncio.create_task(self._offer(controller, place)) for place in places)]
            try:
                await over.wait()
            finally:
                loop.remove_reader(asked.fileno())
                for task in speaking:
                    task.cancel()
                await asyncio.gather(*speaking, return_exceptions=True)
        self._server.should_exit = self._server.force_exit = True
        await serving

    def _answer(self, asked: Connection, over: asyncio.Event) -> None:
        question, places = asked.recv()
        if question == _STOP:
            over.set()
        elif question == _SEEN:
            reply(asked, self._arrivals)
        elif question == _ANNOUNCED:
            reply(asked, [engine.announced[-1] if engine.announced else None for engine in self._engines])
        else:
            for place in places:
                self._die(place)

    def _die(self, place: int) -> None:
        """As a process that was killed: nothing is said to anybody."""
        self._dead.add(place)
        self._following[place].cancel()
        self._server.servers[place].close()
        port = self._ports[place]
        for connection in list(self._server.server_state.connections):
            if getattr(connection, "server", (None, None))[1] == port:
                connection.transport.abort()

    async def _follow(self, redis_url: str, place: int) -> None:
        """What an engine's process does with announcements; it has a connection of its own."""
        stream = await open_stream(redis_url, namespace="scale")
        try:
            await AnnouncedUpdates(self._engines[place], stream, url=self.urls[place]).run()
        finally:
            await stream.close()

    async def _offer(self, controller: AsyncControllerClient, place: int) -> None:
        """What an engine's process says to the controller, again and again."""
        name, incarnation = f"engine-{self._first + place}", f"{os.getpid()}-{place}"
        while place not in self._dead:
            again_s = OFFER_S
            with suppress(UserError):
                again_s = await controller.register_engine(
                    self.urls[place], incarnation=incarnation, name=name, type="mock"
                )
            await asyncio.sleep(again_s)


def _process(
    asked: Connection, first: int, count: int, pace: Pace, controller_url: str, redis_url: str, token: str
) -> None:
    end_with_parent()
    open_many_files()
    uvloop.run(_Served(first, count, pace, token).serve(asked, controller_url, redis_url, token))


@final
class MockFleet:
    """The engines of all processes, as one; `urls` in the order of their numbers."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def begin(self, first: int, count: int, *arguments: Any) -> None:
        """Start a process of `count` engines."""
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_process, args=(theirs, first, count, *arguments), daemon=True)
        process.start()
        theirs.close()
        self._pipes.append(ours)
        self._processes.append(process)

    def await_ports(self) -> None:
        """Return once all serve; raises RuntimeError when they do not."""
        for pipe in self._pipes:
            self.urls += self._received(pipe)

    def die(self, numbers: Sequence[int]) -> None:
        """End these engines without a word."""
        for place, pipe in enumerate(self._pipes):
            if own := [number % _PER_PROCESS for number in numbers if number // _PER_PROCESS == place]:
                pipe.send(("die", own))

    def seen(self) -> dict[int, float]:
        """When each request, by its seed, first came to an engine, in monotonic seconds."""
        first: dict[int, float] = {}
        for pipe in self._pipes:
            pipe.send((_SEEN, []))
        for pipe in self._pipes:
            for seed, at in self._received(pipe).items():
                first[seed] = min(at, first.get(seed, at))
        return first

    def announced(self) -> list[float | None]:
        """When each engine last heard of a version, in monotonic seconds; None for one that never did."""
        for pipe in self._pipes:
            pipe.send((_ANNOUNCED, []))
        return [at for pipe in self._pipes for at in self._received(pipe)]

    def processor_seconds(self) -> float:
        """What all of them have spent so far."""
        return sum(processor_seconds(process.pid) for process in self._processes)

    def close(self) -> None:
        """End them."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            with suppress(OSError):
                pipe.send((_STOP, []))
            process.join(10)
            process.kill()
            process.join(10)
            pipe.close()

    @staticmethod
    def _received(pipe: Connection) -> Any:
        if not pipe.poll(_PATIENCE_S):
            raise RuntimeError(f"the mock engines said nothing for {_PATIENCE_S:g} s")
        return pipe.recv()


_SPAWN: Final = multiprocessing.get_context("spawn")


@contextmanager
def mock_fleet(engines: int, *, pace: Pace, controller_url: str, redis_url: str, token: str) -> Iterator[MockFleet]:
    """So many engines, which offer themselves to the controller and follow announcements."""
    with ExitStack() as stack:
        fleet = MockFleet()
        stack.callback(fleet.close)
        for first in range(0, engines, _PER_PROCESS):
            fleet.begin(first, min(_PER_PROCESS, engines - first), pace, controller_url, redis_url, token)
        fleet.await_ports()
        yield fleet
