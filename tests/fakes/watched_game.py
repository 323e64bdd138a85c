"""`play`: the game of `examples/guess_letter` with pauses before its turns; a test can see which process plays it.

Each open episode has a file in `directory`, named after the process that plays it; a killed process leaves its file.
"""

import asyncio
import importlib.util
import os
from contextlib import suppress
from functools import cache
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, Final, final

import psutil
from numpy.random import Generator

from pipelinerl.plugins.episodes.environment import Task
from pipelinerl.rng import generator

EXAMPLE: Final = Path(__file__).parents[2] / "examples" / "guess_letter" / "game.py"
REFERENCE: Final = f"{__name__}:play"
_numbers = count()


@cache
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("game", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@final
class _Unhurried:
    def __init__(self, client: Any, pauses: Generator, longest_s: float) -> None:
        self._client = client
        self._pauses = pauses
        self._longest_s = longest_s

    async def chat(self, messages: Any) -> Any:
        await asyncio.sleep(self._pauses.uniform(0, self._longest_s))
        return await self._client.chat(messages)


async def play(task: Task, client: Any, *, directory: str, longest_pause_s: float) -> float:
    """Play one episode; a file in `directory` exists as long as the episode is open."""
    file = Path(directory) / f"{os.getpid()}.{next(_numbers)}"
    file.touch()
    try:
        return float(await example().play(task, _Unhurried(client, generator(task.seed, "pauses"), longest_pause_s)))
    finally:
        file.unlink()


def open_episodes(directory: Path) -> list[psutil.Process]:
    """Return the processes that play the open episodes and are alive."""
    playing = []
    for number in {int(path.name.partition(".")[0]) for path in directory.iterdir()}:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(number)
            if process.status() != psutil.STATUS_ZOMBIE:
                playing.append(process)
    return playing
