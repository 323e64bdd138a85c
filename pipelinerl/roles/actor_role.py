"""An actor's process: streams, engine pool, verifiers, episodes and their gateway.

Promises: no order is claimed before the controller has said which engines there are, so that an actor that cannot reach
it takes no work from others, and one that was started first waits.

| waits for | at most | who unblocks it |
|---|---|---|
| the controller's first answer | – | the controller; a warning names its URL and what came instead |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext

from pipelinerl.actor.actor import Actor, ActorSettings
from pipelinerl.actor.episodes import EpisodeDomain, Episodes, Player
from pipelinerl.actor.filtering import Filtering
from pipelinerl.actor.single_turn import SingleTurn
from pipelinerl.controller.client import AsyncControllerClient
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.engines.http.pool import EnginePool
from pipelinerl.errors import AddressError, TokenRefused, UserError
from pipelinerl.roles.episodes import open_episodes
from pipelinerl.roles.judging import JudgeBudget
from pipelinerl.roles.process import Identity, freeze_gc
from pipelinerl.roles.verification import open_filter, open_verifier, rules_of
from pipelinerl.verifiers.group_filter import GroupFilter
from pipelinerl.verifiers.service.calls import ServicePatience
from pipelinerl.verifiers.service.client import RemoteVerifier, VerifierServices
from pipelinerl.verifiers.verifier import GroupVerifier, start
from pipelinerl.verifiers.worker_pool import default_workers

log = logging.getLogger("pipelinerl")

#: The actor whose ties between engines go by the engines' names; every other has an order of its own.
_FIRST = "actor-0"
#: How often an actor asks the controller what it is to work by.
REFRESH_S = 0.5


async def run(identity: Identity) -> None:
    """Work until the process is told to stop."""
    config = identity.config
    services = _verifier_services(identity)
    verifiers = _verifiers(identity, services)
    group_filter = open_filter(config)
    judges: list[GroupVerifier | GroupFilter] = [*verifiers.values(), *([group_filter] if group_filter else [])]

    def verifier_of(domain: str) -> GroupVerifier:
        if domain not in verifiers:
            raise UserError(
                f"domain {domain!r} is not in this actor's recipe; start actor and controller from one recipe"
            )
        return verifiers[domain]

    stream = await identity.stream()
    client = EngineClient(token=identity.token)
    pool = EnginePool(
        client,
        deadline_s=config.actor.timeout_s,
        min_epoch=1,
        interval_s=config.actor.stream_interval_s,
        ties="" if identity.name == _FIRST else identity.name,
    )
    attempts, replay = config.actor.attempts, config.trainer.routing_replay
    domains = open_episodes(config, verifiers)
    single_turn = SingleTurn(pool, verifier_of, attempts=attempts, routing_replay=replay)
    gateway, episodes = _with_gateway(pool, domains, attempts=attempts)
    actor = Actor(
        ActorSettings(name=identity.name, groups_in_flight=config.groups_in_flight),
        stream=stream,
        maker_of=lambda domain: episodes if episodes and domain in domains else single_turn,
        filtering=Filtering(group_filter),
    )
    players = [domain.player for domain in domains.values()]
    try:
        async with asyncio.TaskGroup() as group, gateway:
            starting = group.create_task(_start([*judges, *players]))
            heard = asyncio.Event()
            refresh = group.create_task(_follow_controller(identity, pool, actor, heard, services))
            await heard.wait()
            freeze_gc()
            await actor.run()
            refresh.cancel()
            starting.cancel()
    finally:
        for judge in (*players, *judges):
            await judge.close()
        await services.close()
        await client.close()
        await stream.close()


def _with_gateway(
    pool: EnginePool, domains: Mapping[str, EpisodeDomain], *, attempts: int
) -> tuple[AbstractAsyncContextManager[None], Episodes | None]:
    """What makes groups of episodes, and the gateway that it needs, to be entered; nothing where no domain has them."""
    if not domains:
        return nullcontext(), None
    from pipelinerl.environments.gateway import Gateway  # with a server's libraries, which no other actor needs

    gateway = Gateway()
    return gateway.serve(), Episodes(gateway, pool, domains, attempts=attempts)


def _verifier_services(identity: Identity) -> VerifierServices:
    """The run's verifier services, of which none is known yet, and none asked where actors judge by themselves."""
    section = identity.config.verification
    patience = ServicePatience(grace_s=section.grace_s, silence_s=section.silence_s, timeout_s=section.timeout_s)
    return VerifierServices(token=identity.token, patience=patience)


def _verifiers(identity: Identity, services: VerifierServices) -> dict[str, GroupVerifier]:
    """What judges each domain: services, or this process's own workers."""
    config = identity.config
    judged = [domain for domain in config.domains if domain.has_verifier]
    if config.verification.uses_services:
        return {each.name: RemoteVerifier(services, domain=each.name, rules=rules_of(each)) for each in judged}
    purse = JudgeBudget(identity.run_dir / "judging" / identity.name, config.actor.count)
    return {domain.name: open_verifier(domain, purse=purse) for domain in judged}


async def _start(judges: Sequence[GroupVerifier | GroupFilter | Player]) -> None:
    """Bring up what judges and plays, as many at once as there are workers by default: a domain that is slow to come
    up would else be missing from the first steps. Each is bounded by its own time to start."""
    at_once = asyncio.Semaphore(default_workers())

    async def started(judge: GroupVerifier | GroupFilter | Player) -> None:
        async with at_once:
            await start(judge)

    await asyncio.gather(*(started(judge) for judge in judges))


async def _follow_controller(
    identity: Identity, pool: EnginePool, actor: Actor, heard: asyncio.Event, services: VerifierServices
) -> None:
    """Keep engines, services, concurrency and freshness as the controller says; one that is lost changes nothing.

    Raises:
        AddressError: the controller refuses the token.
    """
    reachable = True
    async with AsyncControllerClient(identity.controller_url, identity.token) as controller:
        while True:
            try:
                assignment = await controller.assignment()
            except TokenRefused:
                raise AddressError(f"the controller at {controller.url} refuses this actor's token") from None
            except UserError as error:
                if reachable:
                    until = "what it said last holds" if heard.is_set() else "this actor claims no orders"
                    log.warning("%s; until one does, %s", error, until)
                reachable = False
            else:
                if not reachable:
                    log.info("the controller at %s answers", controller.url)
                reachable = True
                pool.update(assignment.serving, finishing=assignment.finishing)
                services.update(assignment.verifiers)
                actor.resize(assignment.groups_in_flight)
                actor.follow(model_version=assignment.model_version, k=assignment.staleness_bound)
                heard.set()
            await asyncio.sleep(REFRESH_S)
