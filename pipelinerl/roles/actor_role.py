"""An actor's process: streams, engine pool, verifiers.

Promises: no order is claimed before the controller has said which engines there are, so that an actor that cannot reach
it takes no work from others, and one that was started first waits.

| waits for | at most | who unblocks it |
|---|---|---|
| the controller's first answer | – | the controller; a warning names its URL and what came instead |
"""

from __future__ import annotations

import asyncio
import logging
import math

import httpx
import msgspec

from pipelinerl import registry
from pipelinerl.actor.actor import Actor, ActorSettings
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.engines.http.pool import EnginePool
from pipelinerl.errors import AddressError, UserError
from pipelinerl.roles.process import Identity, freeze_gc
from pipelinerl.verifiers.verifier import Verifier

log = logging.getLogger("pipelinerl")

#: How often an actor asks the controller which engines may be given work.
REFRESH_S = 0.5


class _Told(msgspec.Struct, frozen=True):
    """What the controller answers (`GET /engines`); k is None for no bound."""

    serving: list[str]
    finishing: list[str]
    groups_in_flight: int
    model_version: int
    k: float | None


async def run(identity: Identity) -> None:
    """Work until the process is told to stop."""
    config = identity.config
    verifiers: dict[str, Verifier] = {
        domain.name: registry.load(f"domains.{domain.name}.verifier", registry.VERIFIERS, domain.verifier)()
        for domain in config.domains
    }

    def verifier_of(domain: str) -> Verifier:
        if domain not in verifiers:
            raise UserError(
                f"domain {domain!r} is not in this actor's recipe; start actor and controller from one recipe"
            )
        return verifiers[domain]

    stream = await identity.stream()
    client = EngineClient(token=identity.token)
    pool = EnginePool(client, deadline_s=config.actor.timeout_s, min_epoch=1, interval_s=config.actor.stream_interval_s)
    actor = Actor(
        ActorSettings(
            name=identity.name, groups_in_flight=config.actor.groups_in_flight, attempts=config.actor.attempts
        ),
        stream=stream,
        sampler=pool,
        verifier_of=verifier_of,
    )
    try:
        async with asyncio.TaskGroup() as group:
            heard = asyncio.Event()
            refresh = group.create_task(_follow_controller(identity, pool, actor, heard))
            await heard.wait()
            freeze_gc()
            await actor.run()
            refresh.cancel()
    finally:
        await client.close()
        await stream.close()


async def _follow_controller(identity: Identity, pool: EnginePool, actor: Actor, heard: asyncio.Event) -> None:
    """Keep engines, concurrency and freshness as the controller says; one that is lost changes nothing.

    Raises:
        AddressError: the controller refuses the token.
    """
    url = identity.controller_url
    headers = {"authorization": f"Bearer {identity.token}"} if identity.token else {}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=5.0, trust_env=False) as http:
        reachable = True
        while True:
            try:
                answer = await http.get("/engines")
                if answer.status_code == httpx.codes.UNAUTHORIZED:
                    raise AddressError(f"the controller at {url} refuses this actor's token")
                told = msgspec.json.decode(answer.raise_for_status().content, type=_Told)
            except (httpx.HTTPError, msgspec.DecodeError) as error:
                if reachable:
                    until = "what it said last holds" if heard.is_set() else "this actor claims no orders"
                    reason = str(error) or type(error).__name__  # a connection that times out has no words
                    log.warning("no controller answers at %s (%s); until one does, %s", url, reason, until)
                reachable = False
            else:
                if not reachable:
                    log.info("the controller at %s answers", url)
                reachable = True
                pool.update(told.serving, finishing=told.finishing)
                actor.resize(told.groups_in_flight)
                actor.follow(model_version=told.model_version, k=math.inf if told.k is None else told.k)
                heard.set()
            await asyncio.sleep(REFRESH_S)
