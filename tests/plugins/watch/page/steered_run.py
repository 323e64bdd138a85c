"""A run that looks live to the live page: its files are written in advance, and a real controller serves it.

The page sends changes to the controller's own HTTP API, and their results appear in the controller's events. The test
reports the steps that a trainer would report.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from pipelinerl.observability.events import read_events
from tests.controller.service.test_service import Running, step
from tests.patience import PATIENCE_S
from tests.plugins.watch.run_files import served_controller, written_run

_STATS = {"loss": 0.5, "grad_norm": 0.5, "reward": 0.5}


@dataclass(frozen=True)
class SteeredRun:
    """The directory of a run, and the run's controller, which runs in a thread of its own."""

    directory: Path
    world: Running
    loop: asyncio.AbstractEventLoop

    def takes(self, number: int) -> None:
        """Report a step and wait until the controller has read it."""
        reported = self.world.tell(replace(step(number), stats=_STATS))
        asyncio.run_coroutine_threadsafe(reported, self.loop).result(PATIENCE_S)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the controller's events of this kind."""
        return [event for event in read_events(self.directory / "events.jsonl") if event["kind"] == kind]


@contextmanager
def steered_run(directory: Path) -> Iterator[SteeredRun]:
    """Yield a run with one engine and staleness bound k = 4; its controller ends without notice when the block ends."""
    written_run(directory, steps=1, end=False, overrides=["sampling.group_size=2"])
    begun: Future[tuple[SteeredRun, Callable[[], None]]] = Future()

    async def live() -> None:
        over = asyncio.Event()
        async with served_controller(directory, directory, steps=100) as (world, _):
            begun.set_result((SteeredRun(directory, world, asyncio.get_running_loop()), over.set))
            await over.wait()

    with ThreadPoolExecutor(1) as threads:
        living = threads.submit(lambda: asyncio.run(live()))
        wait([begun, living], PATIENCE_S, FIRST_COMPLETED)
        if not begun.done():
            living.result(0)
        run, end = begun.result(0)
        try:
            yield run
        finally:
            run.loop.call_soon_threadsafe(end)
            living.result(PATIENCE_S)
