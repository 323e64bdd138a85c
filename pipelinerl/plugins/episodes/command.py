"""Episodes played by a program in a subprocess, such as an agent with a command line.

The program finds the model at `OPENAI_BASE_URL` with the key `OPENAI_API_KEY`, as OpenAI's clients do, or at
`ANTHROPIC_BASE_URL` with `ANTHROPIC_API_KEY`. Its task is the last message of the problem: in an argument as `{task}`,
or in a file whose path is `{task_file}`. An exit status other than 0 is a failure of the environment, as is a program
that cannot be started. The program's output goes to the actor's output. The last line of its standard error becomes the
reason of a failure. When the program ends, all processes that it has left are killed (`system/supervised_process.py`).

| waits for | unblocked by | or, at the latest |
|---|---|---|
| the program | it ends | the episode's deadline, then SIGTERM, and `_TERMINATE_S` later SIGKILL |
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Sequence
from typing import Final

from pipelinerl.plugins.episodes.environment import Task, variables_of_agents
from pipelinerl.plugins.episodes.host_pool import EpisodeEnd
from pipelinerl.system.background import to_its_end
from pipelinerl.system.child import end
from pipelinerl.system.supervised_process import ending_of, supervised

_TERMINATE_S: Final = 5.0
_LAST_WORDS_S: Final = 1.0
_TAIL_BYTES: Final = 4096
_TASK: Final = "{task}"
_TASK_FILE: Final = "{task_file}"
_PLACEHOLDER: Final = re.compile(r"\{task(_file)?\}")


class Commands:
    """Player that runs one command line per episode, with the task's text or file in place of the placeholders."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._takes_file = any(_TASK_FILE in part for part in command)

    async def play(self, task: Task, *, base_url: str, api_key: str, timeout_s: float) -> EpisodeEnd:
        """Run the program until it ends. Raises TimeoutError after `timeout_s`."""
        # Lone surrogates cannot be encoded, in an argument or in a file.
        text = (task.messages[-1]["content"] if task.messages else "").encode("utf-8", "replace")
        with contextlib.ExitStack() as kept:
            file = kept.enter_context(tempfile.NamedTemporaryFile(prefix="task-")) if self._takes_file else None
            if file is not None:
                file.write(text)
                file.flush()
            values = {_TASK: text.decode(), _TASK_FILE: "" if file is None else file.name}
            # One pass, since the task may contain a placeholder.
            parts = [_PLACEHOLDER.sub(lambda found: values[found[0]], part) for part in self._command]
            try:
                process = await asyncio.create_subprocess_exec(
                    *supervised(parts, grace_s=_TERMINATE_S),
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
            except (OSError, ValueError) as error:
                reason = f"{self._command[0]} cannot be started: {getattr(error, 'strerror', None) or error}"
                if any(_TASK in part for part in self._command):
                    remedy = f"pass a long one as {_TASK_FILE}, the path of a file"
                    reason = f"{reason}; its task has {len(text)} bytes: {remedy}"
                return EpisodeEnd(how="raised", reason=reason)
            errors = bytearray()
            copying = asyncio.create_task(_copied(process, errors))
            try:
                async with asyncio.timeout(timeout_s):
                    status = await process.wait()
                    await asyncio.wait({copying}, timeout=_LAST_WORDS_S)
            finally:
                copying.cancel()
                with contextlib.suppress(TimeoutError):
                    await to_its_end(end(process, grace_s=_TERMINATE_S))
            if status:
                last = next(iter(errors.decode("utf-8", "replace").strip().splitlines()[-1:]), "it wrote no errors")
                return EpisodeEnd(how="raised", reason=f"{self._command[0]} {ending_of(status)}: {last}")
            return EpisodeEnd(how="returned")

    async def start(self) -> None:
        """Do nothing: each episode starts its own program."""

    async def close(self) -> None:
        """Do nothing: no program outlives its episode."""


async def _copied(process: Process, tail: bytearray) -> None:
    assert process.stderr is not None
    while some := await process.stderr.read(_TAIL_BYTES):
        with contextlib.suppress(OSError, ValueError):  # our own output may be closed
            sys.stderr.buffer.write(some)
            sys.stderr.buffer.flush()
        tail += some
        del tail[:-_TAIL_BYTES]
