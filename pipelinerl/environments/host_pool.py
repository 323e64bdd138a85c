"""The child processes that play the episodes of one environment (`episode_host.py`).

Each host plays at most `EPISODES_OF_A_HOST` episodes at once; another host starts when all are full. At its deadline,
an episode is cancelled. If its code runs for another `_CANCEL_S`, its host is killed, and the host's other episodes are
lost (`HostLost`).

| waits for | unblocked by | or, at the latest |
|---|---|---|
| a host | it has imported the user's code | `_STARTUP_S` |
| an episode | the user's code returns or raises, or its host exits | its deadline and `_CANCEL_S` |
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, final

import msgspec

from pipelinerl.environments.environment import VERIFIERS, Task, variables_of_agents
from pipelinerl.environments.verifiers_host import LONGEST_LINE
from pipelinerl.errors import ReferenceFailed
from pipelinerl.system.background import to_its_end
from pipelinerl.system.supervised_process import ending_of, supervised

EPISODES_OF_A_HOST: Final = 128
#: Time limit for importing user code, or for loading the data of a taskset.
_STARTUP_S: Final = 300.0
_CANCEL_S: Final = 5.0
_END_S: Final = 60.0
_LOOK_S: Final = 60.0
#: Longest wait for the status of a host that has closed its connection.
_REPORT_S: Final = 5.0
_NO_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType({})


class HostLost(Exception):
    """The process that played an episode has exited, or cannot be started.

    `is_first` is True for only one of the episodes that a process's exit ends, so that the failure counts once.
    """

    def __init__(self, message: str, *, is_first: bool = True) -> None:
        super().__init__(message)
        self.is_first = is_first


class MessageTooLong(Exception):
    """A message for an episode host is longer than `LONGEST_LINE`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnd:
    """End of an episode's code; `how` is `returned`, `over`, `raised` or `cancelled`, as in `episode_host`.

    `other` says why what the code returned cannot be used.
    """

    how: str
    reason: str = ""
    value: float | None = None
    verdict: Mapping[str, Any] | None = None
    other: str = ""


@final
@dataclass(slots=True, eq=False)
class _Host:
    process: Process
    writer: asyncio.StreamWriter
    reader: asyncio.StreamReader
    episodes: dict[str, asyncio.Future[EpisodeEnd]] = field(default_factory=dict)
    listening: asyncio.Task[None] | None = None
    end: str = ""
    """Why the host was killed or is no longer used; empty if it ended by itself."""

    @property
    def is_alive(self) -> bool:
        return self.listening is not None and not self.listening.done() and not self.writer.is_closing()

    def send(self, **fields: Any) -> None:
        """Send a message to the host. Raises `MessageTooLong`."""
        line = json.dumps(fields).encode() + b"\n"
        if len(line) > LONGEST_LINE:
            raise MessageTooLong(f"the task has {len(line)} bytes as JSON, and may have {LONGEST_LINE}; shorten it")
        if not self.writer.is_closing():  # writing to a closing stream would raise RuntimeError under uvloop
            self.writer.write(line)

    async def listen(self) -> None:
        """Pass each episode's end to the waiting `play`. If the host exits or sends nonsense, fail all that wait."""
        try:
            while line := await self.reader.readline():
                fields = json.loads(line)
                ended = self.episodes.pop(fields.pop("ended"), None)
                if ended is not None and not ended.done():
                    ended.set_result(msgspec.convert(fields, EpisodeEnd))
        except OSError:
            pass  # the connection broke because the process has ended
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:  # user code wrote to it
            self.end = f"it sent a line that is no message of an episode host ({type(error).__name__}), and was killed"
        finally:
            await self._fail_all()

    async def _fail_all(self) -> None:
        waiting = [each for each in self.episodes.values() if not each.done()]
        self.episodes.clear()
        if self.end:
            self.kill()
        try:
            async with asyncio.timeout(_REPORT_S):
                status = await self.process.wait()
            self.end = self.end or f"it {ending_of(status)}; its output may say why"
        except TimeoutError:
            self.end = self.end or "it closed its connection, and was killed"
        self.kill()
        for place, ended in enumerate(each for each in waiting if not each.done()):
            reason = f"the process that played this episode is gone: {self.end}"
            ended.set_exception(HostLost(reason, is_first=place == 0))

    def kill(self) -> None:
        """Kill the host and all processes that user code has started, by the signal for which their wrapper waits."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGTERM)

    async def close(self) -> None:
        self.writer.close()
        self.kill()
        async with asyncio.timeout(_END_S):
            await self.process.wait()
        if self.listening is not None:
            await asyncio.wait({self.listening}, timeout=_END_S)


@final
class EpisodeHosts:
    """The hosts of one environment, given as in the recipe: its `reference`, and `environment_options`."""

    def __init__(self, reference: str, options: Mapping[str, Any] = _NO_OPTIONS) -> None:
        self._command = _command(reference, options)
        self._hosts: list[_Host] = []
        self._starting = asyncio.Lock()
        self._numbers = itertools.count()
        self._ends: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start a host, so that the first episode does not wait for the import of user code."""
        with contextlib.suppress(HostLost):  # the first episode will report a failure to start
            await self._free()

    async def play(self, task: Task, *, base_url: str, api_key: str, timeout_s: float) -> EpisodeEnd:
        """Play one episode. Raises `TimeoutError`, or `HostLost` if the process exits before the episode's end."""
        host, number = await self._free(), str(next(self._numbers))
        ended: asyncio.Future[EpisodeEnd] = asyncio.get_running_loop().create_future()
        try:
            host.send(begin=number, task=msgspec.to_builtins(task), base_url=base_url, api_key=api_key)
        except MessageTooLong as error:
            return EpisodeEnd(how="raised", reason=str(error))
        host.episodes[number] = ended
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(ended)
        except (TimeoutError, asyncio.CancelledError):
            if not ended.done():
                host.send(cancel=number)
                end = asyncio.create_task(self._end(host, ended))
                self._ends.add(end)
                end.add_done_callback(self._ends.discard)
            raise

    async def close(self) -> None:
        """Terminate the hosts."""
        hosts, self._hosts = self._hosts, []
        await asyncio.gather(*(to_its_end(host.close()) for host in hosts))

    async def _end(self, host: _Host, ended: asyncio.Future[EpisodeEnd]) -> None:
        await asyncio.wait({ended}, timeout=_CANCEL_S)
        if not ended.done():
            host.end = f"another of its episodes did not stop within {_CANCEL_S:g} s of its deadline, and it was killed"
            host.kill()
            await asyncio.wait({ended}, timeout=_END_S)
        if ended.done():
            ended.exception()  # mark the exception as retrieved, so that asyncio does not log it

    async def _free(self) -> _Host:
        async with self._starting:
            gone = [host for host in self._hosts if not host.is_alive]
            self._hosts = [host for host in self._hosts if host.is_alive]
            for host in gone:
                await to_its_end(host.close())
            for host in self._hosts:
                if len(host.episodes) < EPISODES_OF_A_HOST:
                    return host
            host = await _started(self._command)
            self._hosts.append(host)
            return host


def check_taskset(reference: str, options: Mapping[str, Any]) -> None:
    """Raise `ReferenceFailed` if the option `python` of a `verifiers:` environment is missing or lacks verifiers."""
    python = options.get("python")
    if not isinstance(python, str) or not os.access(python, os.X_OK):
        raise ReferenceFailed(
            f"{reference} needs environment_options.python, the Python of an environment with verifiers, got "
            f"{python!r}; make one by: python3 -m venv verifiers && verifiers/bin/pip install verifiers"
        )
    look = "import importlib.util as i; raise SystemExit(i.find_spec('verifiers.v1') is None)"
    if subprocess.run([python, "-c", look], capture_output=True, timeout=_LOOK_S, check=False).returncode:
        raise ReferenceFailed(f"{python} has no verifiers of version 0.4; {python} -m pip install 'verifiers>=0.4'")


def _command(reference: str, options: Mapping[str, Any]) -> list[str]:
    if not reference.startswith(VERIFIERS):
        return [
            sys.executable,
            "-P",
            "-m",
            "pipelinerl.environments.episode_host",
            reference,
            json.dumps(dict(options)),
        ]
    own = {name: value for name, value in options.items() if name != "python"}
    script = str(Path(__file__).with_name("verifiers_host.py"))
    return [options["python"], script, reference.removeprefix(VERIFIERS), json.dumps(own)]


async def _started(command: Sequence[str]) -> _Host:
    ours, theirs = socket.socketpair()
    with theirs, contextlib.ExitStack() as given_up:
        given_up.callback(ours.close)
        process = await asyncio.create_subprocess_exec(
            *supervised(command),
            stdin=theirs.fileno(),
            env=variables_of_agents(os.environ),
            start_new_session=True,
        )
        given_up.pop_all()
    reader, writer = await asyncio.open_connection(sock=ours, limit=LONGEST_LINE)
    host = _Host(process, writer, reader)
    try:
        async with asyncio.timeout(_STARTUP_S):
            first = json.loads(await reader.readline() or b"{}")
    except (TimeoutError, OSError, ValueError):
        first = {}
    except BaseException:
        await to_its_end(host.close())
        raise
    if "ready" not in first:
        await to_its_end(host.close())
        raise HostLost(first.get("error") or "an episode host did not start; its output says why")
    host.listening = asyncio.create_task(host.listen())
    return host
