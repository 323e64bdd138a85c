"""The controller's view of the parameter servers: which of them answer, and which shards no server provides.

| waits for | at most | unblocked by |
|---|---|---|
| a server's answer to a poll | 3 s; each server has a loop of its own | the server |
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from inference_contract.errors import ContractError
from pipelinerl.config.recipe import RunConfig
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.errors import PipelineError
from pipelinerl.observability.status import ParameterServerStatus

#: A server is down after this many missed polls in a row; one that has never answered may still be starting.
_MISSES: Final = 2
_STARTING_MISSES: Final = 30
_ANSWER_S: Final = 3.0

Event = tuple[str, dict[str, Any]]


@dataclass(slots=True)
class _Server:
    shard: int
    replica: int
    state: str = "starting"
    missed: int = 0
    error: str = ""


class ServerWatch:
    """A `TransportWatch` of the servers `urls`: the first `len(urls) / shards` of them are the replicas of shard 0."""

    def __init__(self, urls: Sequence[str], *, shards: int = 1, probe: EngineClient) -> None:
        replicas = len(urls) // shards
        self._servers = {url: _Server(at // replicas, at % replicas) for at, url in enumerate(urls)}
        self._lost_shards: set[int] = set()
        self._probe = probe

    async def run(self, record: Callable[[str, dict[str, Any]], None], *, every_s: float) -> None:
        """Poll every server, until cancelled; `record` the events that follow, as kind and fields."""

        async def watch(url: str) -> None:
            while True:
                for kind, fields in await self._polled(url):
                    record(kind, fields)
                await asyncio.sleep(every_s)

        async with asyncio.TaskGroup() as group:
            for url in self._servers:
                group.create_task(watch(url))

    async def _polled(self, url: str) -> list[Event]:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._probe.metrics(url)
        except TimeoutError:
            return self.missed(url, f"no answer within {_ANSWER_S:g} s")
        except (ContractError, PipelineError) as error:
            return self.missed(url, str(error))
        return self.answered(url)

    def answered(self, url: str) -> list[Event]:
        """Record an answer of the server; return the events that follow."""
        server = self._servers[url]
        was_down, server.state, server.missed, server.error = server.state == "down", "up", 0, ""
        return self._changed("parameter_server_back", url) if was_down else []

    def missed(self, url: str, reason: str) -> list[Event]:
        """Record a missed poll; return the events that follow."""
        server = self._servers[url]
        server.missed, server.error = server.missed + 1, reason
        most = _STARTING_MISSES if server.state == "starting" else _MISSES
        if server.state == "down" or server.missed < most:
            return []
        server.state = "down"
        return self._changed("parameter_server_lost", url, reason=reason)

    def statuses(self) -> tuple[ParameterServerStatus, ...]:
        """Return the servers as the run's status shows them."""
        return tuple(
            ParameterServerStatus(
                url=url, shard=each.shard, replica=each.replica, state=each.state, last_error=each.error
            )
            for url, each in self._servers.items()
        )

    def alarms(self) -> tuple[str, ...]:
        """Return a sentence for each shard without a server."""
        return tuple(map(self._sentence, sorted(self._lost_shards)))

    def _changed(self, kind: str, url: str, **fields: str) -> list[Event]:
        """Return the event `kind` about a server, and those of the alarms that its change raises or clears."""
        server = self._servers[url]
        provided = {each.shard for each in self._servers.values() if each.state != "down"}
        lost = {each.shard for each in self._servers.values()} - provided
        raised, self._lost_shards = self._lost_shards, lost
        events: list[Event] = [(kind, {"url": url, "shard": server.shard, "replica": server.replica, **fields})]
        for shard in sorted(lost ^ raised):
            alarm = {"alarm": "parameter_servers", "domain": f"shard {shard}"}
            is_lost = shard in lost
            events.append(("alarm", {**alarm, "what": self._sentence(shard)}) if is_lost else ("alarm_cleared", alarm))
        return events

    def _sentence(self, shard: int) -> str:
        urls = ", ".join(url for url, each in self._servers.items() if each.shard == shard)
        return f"no parameter server of shard {shard} answers ({urls}), so engines get no new weights; restart one"


def watch_of(config: RunConfig, probe: EngineClient) -> ServerWatch:
    """Return the watch of the recipe's parameter servers."""
    section = config.parameter_server
    return ServerWatch(section.urls, shards=section.shards, probe=probe)
