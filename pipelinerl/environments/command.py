"""Episodes played by a program in a subprocess, such as an agent with a command line.

The program finds the model at `OPENAI_BASE_URL` with the key `OPENAI_API_KEY`, as OpenAI's clients do, or at
`ANTHROPIC_BASE_URL` with `ANTHROPIC_API_KEY`. An exit status other than 0 is a failure of the environment. The
program's output goes to the actor's output. The last line of its standard error becomes the reason of a failure.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| the program | it ends | the episode's deadline, then SIGTERM, and `_TERMINATE_S` later SIGKILL |
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Sequence
from typing import Final, final

from pipelinerl.environments.environment import Task, variables_of_agents
from pipelinerl.environments.host_pool import EpisodeEnd
from pipelinerl.system import tied_process
from pipelinerl.system.background import to_its_end

_TERMINATE_S: Final = 5.0
_END_S: Final = 60.0
_LAST_WORDS_S: Final = 1.0
_TAIL_BYTES: Final = 4096
_TASK: Final = "{task}"


@final
class Commands:
    """Player that runs one command line per episode; `{task}` in an argument becomes the task's last message."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)

    async def play(self, task: Task, *, base_url: str, api_key: str, timeout_s: float) -> EpisodeEnd:
        """Run the program until it ends. Raises TimeoutError after `timeout_s`."""
        text = task.messages[-1]["content"] if task.messages else ""
        tie = [tied_process.__file__, str(os.getpid()), signal.SIGKILL.name, "", "--"]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "-E", *tie, *(part.replace(_TASK, text) for part in self._command)),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=variables_of_agents(
                os.environ,
                OPENAI_BASE_URL=base_url,
                OPENAI_API_KEY=api_key,
                ANTHROPIC_BASE_URL=base_url.removesuffix("/v1"),
                ANTHROPIC_API_KEY=api_key,
            ),
            start_new_session=True,
        )
        errors = bytearray()
        copying = asyncio.create_task(_copied(process, errors))
        try:
            async with asyncio.timeout(timeout_s):
                status = await process.wait()
                # Limit the wait: a child process of the program may keep stderr open.
                await asyncio.wait({copying}, timeout=_LAST_WORDS_S)
        finally:
            copying.cancel()
            await to_its_end(_end(process))
        if status:
            last = next(iter(errors.decode("utf-8", "replace").strip().splitlines()[-1:]), "it wrote no errors")
            return EpisodeEnd(how="raised", reason=f"{self._command[0]} ended with status {status}: {last}")
        return EpisodeEnd(how="returned")

    async def start(self) -> None:
        """Do nothing: each episode starts its own program."""

    async def close(self) -> None:
        """Do nothing: no program outlives its episode."""


async def _copied(process: Process, tail: bytearray) -> None:
    assert process.stderr is not None
    while some := await process.stderr.read(_TAIL_BYTES):
        sys.stderr.buffer.write(some)
        sys.stderr.buffer.flush()
        tail += some
        del tail[:-_TAIL_BYTES]


async def _end(process: Process) -> None:
    for number, timeout_s in ((signal.SIGTERM, _TERMINATE_S), (signal.SIGKILL, _END_S)):
        if process.returncode is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also kills child processes that outlive the program
