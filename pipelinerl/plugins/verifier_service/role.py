"""A verifier service's process: serves the recipe's verifiers to the actors of a run (`plugins/verifier_service`).

The service serves a domain only with the sandbox that the recipe requires; otherwise it fails and names what is
missing. Once its verifiers have started, it registers with the controller by a lease, and actors find it in their
assignments; when it begins to shut down, it withdraws the lease. After a drain, the process ends with status 0.

| waits for | at most | who unblocks it |
|---|---|---|
| the controller, to accept its lease | – | the controller; a warning gives its URL and the error |
| the controller, to withdraw its lease at the end | `_GOODBYE_S` | the controller, or the lease expires |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Sequence
from typing import Final

from pipelinerl.config.domains import DomainSection
from pipelinerl.controller.client import AsyncControllerClient
from pipelinerl.controller.routes import VerifierLease
from pipelinerl.errors import RecipeError, UserError
from pipelinerl.plugins.oubliette.runs import SandboxLost, SandboxMissing, Tier
from pipelinerl.plugins.oubliette.verifier import open_runner
from pipelinerl.plugins.verifier_service.server import VerdictCache, VerifierService, create_app
from pipelinerl.roles.engine_role import offered_url
from pipelinerl.roles.process import Identity, end, freeze_gc
from pipelinerl.roles.verification import JudgeBudget, served_domain
from pipelinerl.system.http_service import listen, serve_until

log = logging.getLogger("pipelinerl")

#: Seconds between lease renewals; the controller forgets a service `routes.LEASE_S` after the last renewal.
OFFER_S: Final = 2.0
_GOODBYE_S: Final = 2.0


async def run(identity: Identity, *, only: Sequence[str] = ()) -> None:
    """Serve the named domains, or all, until stopped or drained; raise `RecipeError` if one cannot be served here."""
    config = identity.config
    domains = _chosen(config.domains, only)
    budget = JudgeBudget(identity.run_dir / "judging" / identity.name, max(1, config.verification.services))
    with listen(identity.host, identity.port) as listener:
        url = ""
        if identity.controller_url:
            url = offered_url(listener.getsockname(), identity.controller_url, what="verifier service")
        await _try_sandboxes(domains)
        service = VerifierService(
            {domain.name: served_domain(domain, budget=budget) for domain in domains if domain.has_verifier},
            cache=VerdictCache(config.verification.cache_mb << 20),
        )
        drained = asyncio.create_task(service.drained.wait())
        leasing = asyncio.create_task(_lease(identity, service, url)) if url else None
        try:
            await serve_until(create_app(service, token=identity.token), listener, over=drained)
        finally:
            await end(drained, leasing)


def _chosen(domains: Sequence[DomainSection], only: Sequence[str]) -> list[DomainSection]:
    names = [domain.name for domain in domains]
    if unknown := [name for name in only if name not in names]:
        raise RecipeError(f"--domain must be one of {', '.join(names)}; got {', '.join(unknown)}")
    return [domain for domain in domains if not only or domain.name in only]


async def _try_sandboxes(domains: Sequence[DomainSection]) -> None:
    """Open each required sandbox: a local one is tested with attacks, a remote one is only checked for availability."""
    sandboxes: dict[tuple[Tier, str], DomainSection] = {}
    for domain in domains:
        if "oubliette" in {domain.verifier, *(part.function for part in domain.rewards)}:
            sandboxes.setdefault((domain.oubliette.tier, domain.oubliette.url), domain)
    for domain in sandboxes.values():
        try:
            runner = await open_runner(domain.oubliette.rules, at_once=1)
        except (SandboxMissing, SandboxLost) as error:
            raise RecipeError(f"domains.{domain.name}.oubliette.tier: {error}") from None
        await runner.close()


async def _lease(identity: Identity, service: VerifierService, url: str) -> None:
    await service.started.wait()
    freeze_gc()
    lease = VerifierLease(url=url, incarnation=f"{os.getpid()}-{time.time_ns()}", domains=service.rules)
    async with AsyncControllerClient(identity.controller_url, identity.token) as controller:
        try:
            await _offer(controller, service, lease)
        finally:
            with contextlib.suppress(UserError, TimeoutError):
                async with asyncio.timeout(_GOODBYE_S):
                    await controller.withdraw_verifier(url)


async def _offer(controller: AsyncControllerClient, service: VerifierService, lease: VerifierLease) -> None:
    reachable = True
    while not service.closing.is_set():
        try:
            await controller.offer_verifier(lease)
            reachable = True
        except UserError as error:
            if reachable:
                log.warning("the controller at %s did not take this verifier service: %s", controller.url, error)
            reachable = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OFFER_S if reachable else OFFER_S / 4):
                await service.closing.wait()
