"""An actor's process: streams, engine pool, verifiers."""

from __future__ import annotations

import asyncio
import contextlib
import math

import httpx

from pipelinerl import registry
from pipelinerl.actor.actor import Actor, ActorSettings
from pipelinerl.engines.engine_pool import EnginePool
from pipelinerl.engines.http_client import EngineClient
from pipelinerl.errors import AddressError, UserError
from pipelinerl.roles.process import Identity
from pipelinerl.verifiers.verifier import Verifier

#: How often an actor asks the controller which engines may be given work.
REFRESH_S = 0.5


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
    pool = EnginePool(client, deadline_s=config.actor.timeout_s, min_epoch=1)
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
            refresh = group.create_task(_follow_controller(identity, pool, actor))
            await actor.run()
            refresh.cancel()
    finally:
        await client.close()
        await stream.close()


async def _follow_controller(identity: Identity, pool: EnginePool, actor: Actor) -> None:
    """Keep engines, concurrency and freshness as the controller says; an unreachable controller changes nothing."""
    headers = {"authorization": f"Bearer {identity.token}"} if identity.token else {}
    async with httpx.AsyncClient(base_url=identity.controller_url, headers=headers, timeout=5.0) as http:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                answer = await http.get("/engines")
                if answer.status_code == httpx.codes.UNAUTHORIZED:
                    raise AddressError(f"the controller at {identity.controller_url} refuses this actor's token")
                said = answer.raise_for_status().json()
                pool.update(said["serving"], finishing=said["finishing"])
                actor.resize(said["groups_in_flight"])
                actor.follow(model_version=said["model_version"], k=math.inf if said["k"] is None else said["k"])
            await asyncio.sleep(REFRESH_S)
