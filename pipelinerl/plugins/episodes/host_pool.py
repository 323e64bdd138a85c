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
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import msgspec

from pipelinerl import registry
from pipelinerl.component import imported
from pipelinerl.plugins.episodes.environment import Task, variables_of_agents
from pipelinerl.plugins.episodes.verifiers_host import LONGEST_LINE
from pipelinerl.system.background import to_its_end
from pipelinerl.system.child import Child, ChildLost, encoded

EPISODES_OF_A_HOST: Final = 128
#: Time limit for importing user code, or for loading the data of a taskset.
_STARTUP_S: Final = 300.0
_CANCEL_S: Final = 5.0
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


class _Host:
    def __init__(self, child: Child) -> None:
        self.child = child
        self.episodes: dict[str, asyncio.Future[EpisodeEnd]] = {}
        self.end = ""
        """Why the host was killed or is no longer used; empty if it ended by itself."""
        self._listening = asyncio.create_task(self._listen())

    @property
    def is_alive(self) -> bool:
        return not self._listening.done() and self.child.lines.is_open

    async def _listen(self) -> None:
        """Pass each episode's end to the waiting `play`. If the host exits or sends nonsense, fail all that wait."""
        try:
            while True:
                fields = await self.child.lines.receive()
                ended = self.episodes.pop(fields.pop("ended"), None)
                if ended is not None and not ended.done():
                    ended.set_result(msgspec.convert(fields, EpisodeEnd))
        except EOFError:
            pass
        except (ValueError, TypeError, LookupError, AttributeError) as error:  # user code wrote to the socket
            self.end = f"it sent a line that is no message of an episode host ({type(error).__name__}), and was killed"
            self.child.kill()
        finally:
            waiting = [each for each in self.episodes.values() if not each.done()]
            self.episodes.clear()
            try:
                ending = f"it {await self.child.ending(timeout_s=_REPORT_S)}; its output may say why"
            except TimeoutError:
                ending = "it closed its connection, and was killed"
                self.child.kill()
            self.end = self.end or ending
            for place, ended in enumerate(each for each in waiting if not each.done()):
                reason = f"the process that played this episode is gone: {self.end}"
                ended.set_exception(HostLost(reason, is_first=place == 0))

    def kill(self, reason: str) -> None:
        """Kill the host, with `reason` for its episodes, and all processes that user code has started."""
        self.end = reason
        self.child.kill()

    async def close(self) -> None:
        await self.child.close()
        await asyncio.wait({self._listening}, timeout=_REPORT_S)


class EpisodeHosts:
    """The hosts of one environment, given as in the recipe: its `reference`, and `environment_options`."""

    def __init__(self, reference: str, options: Mapping[str, Any] = _NO_OPTIONS) -> None:
        self._command, self._options = _command(reference, options)
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
        fields = {"begin": number, "task": msgspec.to_builtins(task), "base_url": base_url, "api_key": api_key}
        if len(line := encoded(fields)) > LONGEST_LINE:
            reason = f"the task has {len(line)} bytes as JSON, and may have {LONGEST_LINE}; shorten it"
            return EpisodeEnd(how="raised", reason=reason)
        host.child.lines.write(line)
        host.episodes[number] = ended
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(ended)
        except (TimeoutError, asyncio.CancelledError):
            if not ended.done():
                host.child.lines.write(encoded({"cancel": number}))
                end = asyncio.create_task(self._end(host, ended))
                self._ends.add(end)
                end.add_done_callback(self._ends.discard)
            raise

    async def close(self) -> None:
        hosts, self._hosts = self._hosts, []
        await asyncio.gather(*(to_its_end(host.close()) for host in hosts))

    async def _end(self, host: _Host, ended: asyncio.Future[EpisodeEnd]) -> None:
        await asyncio.wait({ended}, timeout=_CANCEL_S)
        if not ended.done():
            host.kill(f"another of its episodes did not stop within {_CANCEL_S:g} s of its deadline, and it was killed")
            await asyncio.wait({ended}, timeout=2 * _REPORT_S)
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
            try:
                child = await Child.start(
                    self._command,
                    "an episode host",
                    startup_s=_STARTUP_S,
                    most_bytes=LONGEST_LINE,
                    env=variables_of_agents(os.environ),
                    options=self._options,
                )
            except ChildLost as error:
                raise HostLost(str(error)) from None
            self._hosts.append(host := _Host(child))
            return host


def _command(reference: str, options: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the command of a host, and the options that it gets through its socket: `ps` shows commands to all."""
    name, _, argument = reference.partition(":")
    component = registry.ENVIRONMENTS.get(name)
    if component is not None and component.own_host:
        command: tuple[list[str], dict[str, Any]] = imported(component.build)(argument, options)
        return command
    return [sys.executable, "-P", "-m", "pipelinerl.plugins.episodes.episode_host", reference], dict(options)
