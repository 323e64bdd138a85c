"""An actor's process: streams, engine pool, verifiers, episodes, and the gateway that serves OpenAI's API to agents.

The actor claims no prompt order (a work request) before it knows the run's engines from the controller. So an actor
that cannot reach the controller takes no work from other actors, and an actor may start before the controller.

| waits for | at most | who unblocks it |
|---|---|---|
| the controller's first answer | – | the controller; a warning gives its URL and the error |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import nullcontext

from pipelinerl import registry
from pipelinerl.actor.actor import Actor, ActorSettings
from pipelinerl.actor.group_maker import EpisodeMaker
from pipelinerl.actor.single_turn import SingleTurn
from pipelinerl.controller.client import AsyncControllerClient
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.engines.http.pool import EnginePool
from pipelinerl.engines.http.prompts import PromptCheck
from pipelinerl.errors import AddressError, TokenRefused, UserError
from pipelinerl.roles.process import Identity, freeze_gc
from pipelinerl.roles.verification import open_episodes, open_filter, open_verifier, rules_of
from pipelinerl.system.service_client import ServicePatience
from pipelinerl.verifiers.group_filter import GroupFilter
from pipelinerl.verifiers.verifier import BudgetShare, GroupVerifier, VerdictServices, start
from pipelinerl.verifiers.worker_pool import default_workers

log = logging.getLogger("pipelinerl")

#: Among equally busy engines, this actor chooses by the engines' names. Every other actor has a ranking of its own, so
#: that actors do not all choose the same engine.
_FIRST = "actor-0"
#: Seconds between two requests to the controller for the actor's assignment (engines, concurrency, …).
REFRESH_S = 0.5


async def run(identity: Identity) -> None:
    """Sample and verify rollouts until the process is stopped."""
    config = identity.config
    services: VerdictServices | None = None
    judged = [domain for domain in config.domains if domain.has_verifier]
    if config.verification.uses_services:
        limits = config.verification.model_dump(include={"grace_s", "silence_s", "timeout_s"})
        open_services = registry.load("verification.judged_in", registry.JUDGED_IN, "services")
        services = open_services(
            token=identity.token, patience=ServicePatience(**limits)
        )  # knows none until the first assignment
        verifiers = {each.name: services.verifier(each.name, rules_of(each)) for each in judged}
    else:
        budget = BudgetShare(identity.run_dir / "judging" / identity.name, config.actor.count)
        verifiers = {each.name: open_verifier(each, budget=budget) for each in judged}
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
        check_prompt=PromptCheck(config.model.resolved),
    )
    attempts, replay = config.actor.attempts, config.trainer.routing_replay
    single_turn = SingleTurn(pool, verifier_of, attempts=attempts, routing_replay=replay)
    episodes = open_episodes(config, pool, verifiers)
    played = {domain.name for domain in config.domains if domain.has_environment}
    actor = Actor(
        ActorSettings(name=identity.name, groups_in_flight=config.groups_in_flight),
        stream=stream,
        maker_of=lambda domain: episodes if episodes and domain in played else single_turn,
        group_filter=group_filter,
    )
    players = [episodes] if episodes else []
    try:
        async with asyncio.TaskGroup() as group, episodes.serve() if episodes else nullcontext():
            starting = group.create_task(_start([*judges, *players]))
            assigned = asyncio.Event()
            refresh = group.create_task(_follow_controller(identity, pool, actor, assigned, services))
            await assigned.wait()
            freeze_gc()
            await actor.run()
            refresh.cancel()
            starting.cancel()
    finally:
        for judge in (*players, *judges):
            await judge.close()
        if services is not None:
            await services.close()
        await client.close()
        await stream.close()


async def _start(judges: Sequence[GroupVerifier | GroupFilter | EpisodeMaker]) -> None:
    """Start verifiers, filter and environments before sampling; otherwise slow domains would miss the first step."""
    at_once = asyncio.Semaphore(default_workers())

    async def started(judge: GroupVerifier | GroupFilter | EpisodeMaker) -> None:
        async with at_once:
            await start(judge)

    await asyncio.gather(*(started(judge) for judge in judges))


async def _follow_controller(
    identity: Identity, pool: EnginePool, actor: Actor, assigned: asyncio.Event, services: VerdictServices | None
) -> None:
    """Apply each assignment of the controller; each is valid until the next, also while the controller is down."""
    reachable = True
    async with AsyncControllerClient(identity.controller_url, identity.token) as controller:
        while True:
            try:
                assignment = await controller.assignment()
            except TokenRefused:
                raise AddressError(f"the controller at {controller.url} refuses this actor's token") from None
            except UserError as error:
                if reachable:
                    until = "the last assignment stays in force" if assigned.is_set() else "this actor claims no orders"
                    log.warning("%s; until it answers, %s", error, until)
                reachable = False
            else:
                if not reachable:
                    log.info("the controller at %s answers", controller.url)
                reachable = True
                pool.update(assignment.serving, finishing=assignment.finishing, speeds=assignment.speeds)
                if services is not None:
                    services.update(assignment.verifiers)
                actor.resize(assignment.groups_in_flight)
                actor.follow(model_version=assignment.model_version, k=assignment.staleness_bound)
                assigned.set()
            await asyncio.sleep(REFRESH_S)
