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

from pipelinerl.component import imported
from pipelinerl.config.domains import DomainSection
from pipelinerl.controller.client import AsyncControllerClient
from pipelinerl.controller.routes import VerifierLease
from pipelinerl.errors import RecipeError, UserError
from pipelinerl.plugins.verifier_service.server import VerdictCache, VerifierService, create_app
from pipelinerl.plugins.verifier_service.wire import ServedDomain
from pipelinerl.roles.process import Identity, end, freeze_gc
from pipelinerl.roles.verification import open_verifier, rules_of
from pipelinerl.system.http_service import listen, offered_url, serve_until
from pipelinerl.verifiers.verifier import BudgetShare

log = logging.getLogger("pipelinerl")

#: Seconds between lease renewals; the controller forgets a service `routes.LEASE_S` after the last renewal.
OFFER_S: Final = 2.0
_GOODBYE_S: Final = 2.0


async def run(identity: Identity, *, only: Sequence[str] = ()) -> None:
    """Serve the named domains, or all, until stopped or drained; raise `RecipeError` if one cannot be served here."""
    config = identity.config
    names = [domain.name for domain in config.domains]
    if unknown := [name for name in only if name not in names]:
        raise RecipeError(f"--domain must be one of {', '.join(names)}; got {', '.join(unknown)}")
    domains = [domain for domain in config.domains if not only or domain.name in only]
    budget = BudgetShare(identity.run_dir / "judging" / identity.name, max(1, config.verification.services))
    with listen(identity.host, identity.port) as listener:
        url = ""
        if identity.controller_url:
            url = offered_url(listener.getsockname(), identity.controller_url, what="verifier service")
        judged = [domain for domain in domains if domain.has_verifier]
        tiers = await _tiers_of(judged)
        service = VerifierService(
            {each.name: served_domain(each, budget=budget, tier=tiers.get(each.name, "")) for each in judged},
            cache=VerdictCache(config.verification.cache_mb << 20),
        )
        drained = asyncio.create_task(service.drained.wait())
        leasing = asyncio.create_task(_lease(identity, service, url)) if url else None
        try:
            await serve_until(create_app(service, token=identity.token), listener, over=drained)
        finally:
            await end(drained, leasing)


def served_domain(domain: DomainSection, *, budget: BudgetShare | None = None, tier: str = "") -> ServedDomain:
    """Return what the service needs to serve a domain; `tier` is that of its sandbox. Raises like `open_verifier`."""
    registered = list(domain.registered_verifiers)
    is_deterministic = all(component.deterministic for _, component, _ in registered)
    return ServedDomain(
        verifier=open_verifier(domain, budget=budget),
        rules=rules_of(domain),
        kept=is_deterministic and len(registered) == len(domain.verifiers),  # user code may be random
        tier=tier,
    )


async def _tiers_of(domains: Sequence[DomainSection]) -> dict[str, str]:
    """Open each sandbox that the domains' verifiers need, once; return its tier by domain.

    Raises `RecipeError` if this machine lacks one of them.
    """
    tiers: dict[str, str] = {}
    opened: dict[tuple[str, str], str] = {}
    for domain in domains:
        for name, component, options in domain.registered_verifiers:
            if component.probe:
                sandbox = name, options.model_dump_json()
                try:
                    opened[sandbox] = opened.get(sandbox) or await imported(component.probe)(options)
                except UserError as error:
                    raise RecipeError(f"domains.{domain.name}.{error}") from None
                tiers[domain.name] = opened[sandbox]
    return tiers


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
