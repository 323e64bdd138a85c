"""`VerifierService` and its application: judges actors' answers with the same verifiers that an actor would use.

If the client of a request disconnects, the request is abandoned and the workers that judge it are killed. If a domain's
verifier is deterministic (`ServedDomain.kept`), equal answers to one problem are judged once, and verdicts are cached.

`run`, the role's process, serves a domain only with the sandbox that the recipe requires; otherwise it fails and names
what is missing. Once its verifiers have started, it registers with the controller by a lease, and actors find it in
their assignments; when it begins to shut down, it withdraws the lease. After a drain, it ends with status 0.

| waits for | at most | unblocked by |
|---|---|---|
| a verdict | the verifier's own deadline | its worker, which the deadline kills |
| the client, to read the response | – | the client reads, leaves or dies |
| a drain | – | the last verdict; to end it early, send SIGTERM |
| the controller, to accept its lease | – | the controller; a warning gives its URL and the error |
| the controller, to withdraw its lease at the end | `_GOODBYE_S` | the controller, or the lease expires |
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Final

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response
from starlette.routing import Route

from pipelinerl.component import imported
from pipelinerl.config.domains import DomainSection
from pipelinerl.controller.client import AsyncControllerClient
from pipelinerl.controller.routes import VerifierLease
from pipelinerl.errors import RecipeError, UserError
from pipelinerl.plugins.verifier_service import wire
from pipelinerl.plugins.verifier_service.wire import (
    DomainStatus,
    Draining,
    JudgedAnswer,
    ServedDomain,
    ServiceStatus,
    VerifyAnswer,
    VerifyRequest,
)
from pipelinerl.roles.process import Identity, end, freeze_gc
from pipelinerl.roles.verification import open_verifier, rules_of
from pipelinerl.system.http_service import (
    MOST_WAITING,
    Backlog,
    HeartbeatRoute,
    RequestRefused,
    guard,
    json_response,
    listen,
    offered_url,
    refuse_in_one_shape,
    serve_until,
)
from pipelinerl.types import Problem, Verdict
from pipelinerl.verifiers.verdicts import judged
from pipelinerl.verifiers.verifier import BudgetShare, Judgement, SampledAnswer, start

#: Bytes of memory that a cache entry takes in addition to the verdict: its key, and Python's objects.
_PLACE_BYTES: Final = 256


def keys_of(rules: str, problem: Problem, texts: Iterable[str]) -> list[bytes]:
    """Return for each answer text a 32-byte hash of everything that a deterministic verifier's verdict depends on.

    The part that all answers share is hashed only once: a problem may have megabytes and four thousand answers.
    """
    inputs = [rules, problem.domain, problem.messages, problem.ground_truth, problem.metadata]
    of_all = hashlib.blake2b(msgspec.json.encode(inputs, order="sorted"), digest_size=32)
    keys = []
    for text in texts:
        of_one = of_all.copy()
        of_one.update(msgspec.json.encode(text))
        keys.append(of_one.digest())
    return keys


class VerdictCache:
    """The most recently used verdicts, in at most `most_bytes`, by the keys that `keys_of` returns."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[bytes, bytes] = OrderedDict()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Verdict)
        self.num_bytes = 0
        """Size of the cached entries."""

    def find(self, key: bytes) -> Verdict | None:
        """Return the verdict cached under `key`, or None."""
        encoded = self._kept.get(key)
        if encoded is None:
            return None
        self._kept.move_to_end(key)
        return self._decoder.decode(encoded)

    def keep(self, key: bytes, verdict: Verdict) -> None:
        """Cache `verdict` under `key`, unless it reports a failure of the verifier; evict old entries for room."""
        if not verdict.outcome.is_judgement:
            return
        encoded = self._encoder.encode(verdict)
        if (known := self._kept.pop(key, None)) is not None:
            self.num_bytes -= len(known) + _PLACE_BYTES
        self._kept[key] = encoded
        self.num_bytes += len(encoded) + _PLACE_BYTES
        while self.num_bytes > self._most_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.num_bytes -= len(oldest) + _PLACE_BYTES


class VerifierService:
    """Implementation of a verifier service's routes, on one event loop."""

    def __init__(
        self, domains: Mapping[str, ServedDomain], *, cache: VerdictCache, most_waiting: int = MOST_WAITING
    ) -> None:
        self.domains = dict(domains)
        self._cache = cache
        self._backlog = Backlog("answers", protocol=wire.PROTOCOL, most=most_waiting)
        self._verdicts = self._hits = 0
        self.started = asyncio.Event()
        """Set once every verifier has started."""
        self.closing = asyncio.Event()
        """Set once the service accepts no more requests."""
        self.drained = asyncio.Event()
        """Set once the service is closing and every accepted answer has its verdict."""

    @property
    def state(self) -> str:
        """State of the service: `ready` or `draining`."""
        return "draining" if self.closing.is_set() else "ready"

    async def start(self) -> None:
        """Start all verifiers; a failure is reported when the first answer is judged."""
        await asyncio.gather(*(start(domain.verifier) for domain in self.domains.values()))
        self.started.set()

    async def close(self) -> None:
        for domain in self.domains.values():
            await domain.verifier.close()

    def drain(self) -> int:
        """Accept no more requests; return the number of answers that still wait for a verdict."""
        self.closing.set()
        if not self._backlog.count:
            self.drained.set()
        return self._backlog.count

    def admit(self, request: VerifyRequest) -> ServedDomain:
        """Return the domain for the request. Raises `RequestRefused` if the request is not accepted."""
        if self.closing.is_set():
            raise RequestRefused(503, wire.IS_DRAINING, "this service accepts no new requests; use another")
        self._backlog.admit(len(request.answers), protocol=request.protocol)
        domain = self.domains.get(request.domain)
        if domain is None:
            known = ", ".join(self.domains) or "none"
            raise RequestRefused(404, wire.UNKNOWN_DOMAIN, f"domain must be one of those judged here: {known}")
        if request.rules != domain.rules:
            raise RequestRefused(
                409,
                wire.OTHER_RULES,
                f"rules: this service judges {request.domain} by another recipe; start it with the recipe of the run",
            )
        return domain

    async def judge(self, domain: ServedDomain, request: VerifyRequest) -> VerifyAnswer:
        """Return a verdict for each answer of an admitted request."""
        count = len(request.answers)
        try:
            with self._backlog.holding(count):
                if domain.kept:
                    judgements = await self._cached_or_judged(domain, request.problem, request.answers)
                else:
                    judgements = await judged(domain.verifier, request.problem, request.answers)
                self._verdicts += count
        finally:
            if self.closing.is_set() and not self._backlog.count:
                self.drained.set()
        return VerifyAnswer(judged=tuple(JudgedAnswer(verdict=v, seconds=max(0.0, s)) for v, s in judgements))

    def status(self) -> ServiceStatus:
        domains = {
            name: DomainStatus(rules=domain.rules, tier=domain.tier, kept=domain.kept)
            for name, domain in self.domains.items()
        }
        return ServiceStatus(
            protocol=wire.PROTOCOL,
            version=version("pipelinerl"),
            state=self.state,
            domains=domains,
            queue=self._backlog.count,
            verdicts=self._verdicts,
            hits=self._hits,
            cache_bytes=self._cache.num_bytes,
        )

    async def _cached_or_judged(
        self, domain: ServedDomain, problem: Problem, answers: Sequence[SampledAnswer]
    ) -> list[Judgement]:
        keys = keys_of(domain.rules, problem, (answer.text for answer in answers))
        judgements = {key: Judgement(verdict, 0.0) for key in keys if (verdict := self._cache.find(key)) is not None}
        missing = {key: answer for key, answer in zip(keys, answers, strict=True) if key not in judgements}
        self._hits += len(answers) - len(missing)
        if missing:
            reached = await judged(domain.verifier, problem, list(missing.values()))
            for key, judgement in zip(missing, reached, strict=True):
                self._cache.keep(key, judgement.verdict)
                judgements[key] = judgement
        return [judgements[key] for key in keys]


# --- HTTP --------------------------------------------------------------------------------------------------------


def create_app(service: VerifierService, *, token: str | None) -> FastAPI:
    """Return the application that starts, serves and closes `service`; only /health needs no `token`."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(title="pipelinerl verifier", lifespan=lifespan, openapi_url=None)
    app.get(wire.HEALTH)(lambda: {"state": service.state})

    @app.get(wire.STATUS)
    async def status() -> Response:
        return json_response(service.status())

    @app.post(wire.DRAIN)
    async def drain() -> Response:
        return json_response(Draining(service.drain()))

    def begin(request: VerifyRequest) -> HeartbeatRoute.Work:
        return service.judge(service.admit(request), request)

    app.router.routes.append(Route(wire.VERIFY, HeartbeatRoute(VerifyRequest, begin), methods=["POST"]))
    refuse_in_one_shape(app)
    guard(app, token=token)
    return app


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
    rules = {name: domain.rules for name, domain in service.domains.items()}
    lease = VerifierLease(url=url, incarnation=f"{os.getpid()}-{time.time_ns()}", domains=rules)
    async with AsyncControllerClient(identity.controller_url, identity.token) as controller:
        reachable = True
        try:
            while not service.closing.is_set():
                try:
                    await controller.offer_verifier(lease)
                    reachable = True
                except UserError as error:
                    if reachable:
                        log.warning(
                            "the controller at %s did not take this verifier service: %s", controller.url, error
                        )
                    reachable = False
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(OFFER_S if reachable else OFFER_S / 4):
                        await service.closing.wait()
        finally:
            with contextlib.suppress(UserError, TimeoutError):
                async with asyncio.timeout(_GOODBYE_S):
                    await controller.withdraw_verifier(url)
