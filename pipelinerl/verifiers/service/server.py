"""`VerifierService` and its application: judges what actors send, domain by domain, as an actor would by itself.

Promises: every request that is answered has one verdict for each of its answers; one whose asker has gone is given up,
and its workers are killed; a request that is refused was not begun. Equal answers to one problem are judged once, and
not again as long as they are in the cache, where the domain's verifier says always the same (`ServedDomain.kept`).

| waits for | at most | who unblocks it |
|---|---|---|
| a verdict | the verifier's own deadline | its worker, which the deadline kills |
| whoever asked, to take the answer | – | he takes it, leaves or dies |
| a drain | – | the last verdict; who cannot wait sends SIGTERM |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Final, final

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response
from starlette.routing import Route

from pipelinerl.system.http_service import guard, refuse_in_one_shape
from pipelinerl.types import Problem
from pipelinerl.verifiers.service import wire
from pipelinerl.verifiers.service.beating import HeartbeatRoute, RequestRefused
from pipelinerl.verifiers.service.served_domain import ServedDomain
from pipelinerl.verifiers.service.verdict_cache import VerdictCache, keys_of
from pipelinerl.verifiers.service.wire import (
    DomainStatus,
    Draining,
    JudgedAnswer,
    ServiceStatus,
    VerifyAnswer,
    VerifyRequest,
)
from pipelinerl.verifiers.verifier import Judgement, SampledAnswer, start

#: Answers that a service holds at most; whoever asks for more is sent to another, or waits.
MOST_WAITING: Final = 65_536


@final
class VerifierService:
    """One service's work behind its routes, on one event loop."""

    def __init__(
        self, domains: Mapping[str, ServedDomain], *, cache: VerdictCache, most_waiting: int = MOST_WAITING
    ) -> None:
        self._domains = dict(domains)
        self._cache = cache
        self._most_waiting = most_waiting
        self._queue = self._verdicts = self._hits = 0
        self.started = asyncio.Event()
        """Set once every verifier is up."""
        self.closing = asyncio.Event()
        """Set once nothing new is taken."""
        self.drained = asyncio.Event()
        """Set once it is closing and everything has its verdict."""

    @property
    def rules(self) -> Mapping[str, str]:
        """The digest of each domain's rules."""
        return {name: domain.rules for name, domain in self._domains.items()}

    @property
    def state(self) -> str:
        """`ready`, or `draining`."""
        return "draining" if self.closing.is_set() else "ready"

    async def start(self) -> None:
        """Bring up every verifier that can be; what fails is told by the first answer."""
        await asyncio.gather(*(start(domain.verifier) for domain in self._domains.values()))
        self.started.set()

    async def close(self) -> None:
        """Close every verifier, and with it its workers."""
        for domain in self._domains.values():
            await domain.verifier.close()

    def drain(self) -> int:
        """Take nothing new from now on; returns how many answers still wait for a verdict."""
        self.closing.set()
        if not self._queue:
            self.drained.set()
        return self._queue

    def admit(self, request: VerifyRequest) -> ServedDomain:
        """The domain that is to judge the request. Raises `RequestRefused`."""
        if request.protocol != wire.PROTOCOL:
            raise RequestRefused(
                409,
                wire.OTHER_PROTOCOL,
                f"protocol must be {wire.PROTOCOL}, got {request.protocol}: use one version of pipelinerl",
            )
        domain = self._domains.get(request.domain)
        if domain is None:
            known = ", ".join(self._domains) or "none"
            raise RequestRefused(
                404, wire.UNKNOWN_DOMAIN, f"domain must be one of those judged here, which are {known}"
            )
        if request.rules != domain.rules:
            raise RequestRefused(
                409,
                wire.OTHER_RULES,
                f"rules: this service judges {request.domain} by another recipe; start it with the run's",
            )
        if self.closing.is_set():
            raise RequestRefused(503, wire.IS_DRAINING, "this service takes nothing new; ask another")
        if self._queue and self._queue + len(request.answers) > self._most_waiting:
            raise RequestRefused(
                503, wire.IS_FULL, f"this service holds {self._queue} answers already; ask again later"
            )
        return domain

    async def judge(self, domain: ServedDomain, request: VerifyRequest) -> VerifyAnswer:
        """A verdict for each answer of a request that was admitted."""
        count = len(request.answers)
        self._queue += count
        try:
            if domain.kept:
                judgements = await self._found_or_reached(domain, request.problem, request.answers)
            else:
                judgements = await domain.verifier.judge(request.problem, request.answers)
            if len(judgements) != count:
                raise AssertionError(f"{count} answers of {request.domain} had {len(judgements)} verdicts")
            self._verdicts += count
        finally:
            self._queue -= count
            if self.closing.is_set() and not self._queue:
                self.drained.set()
        return VerifyAnswer(judged=tuple(JudgedAnswer(verdict=v, seconds=max(0.0, s)) for v, s in judgements))

    def status(self) -> ServiceStatus:
        """What is judged here, and how much."""
        domains = {
            name: DomainStatus(rules=domain.rules, tier=domain.tier, kept=domain.kept)
            for name, domain in self._domains.items()
        }
        return ServiceStatus(
            protocol=wire.PROTOCOL,
            version=version("pipelinerl"),
            state=self.state,
            domains=domains,
            queue=self._queue,
            verdicts=self._verdicts,
            hits=self._hits,
            cache_bytes=self._cache.num_bytes,
        )

    async def _found_or_reached(
        self, domain: ServedDomain, problem: Problem, answers: Sequence[SampledAnswer]
    ) -> list[Judgement]:
        """What is known, and the rest from the verifier, each different answer once."""
        keys = keys_of(domain.rules, problem, (answer.text for answer in answers))
        found = {key: Judgement(verdict, 0.0) for key in keys if (verdict := self._cache.find(key)) is not None}
        missing = {key: answer for key, answer in zip(keys, answers, strict=True) if key not in found}
        self._hits += len(answers) - len(missing)
        if missing:
            reached = await domain.verifier.judge(problem, list(missing.values()))
            for key, judgement in zip(missing, reached, strict=True):
                self._cache.keep(key, judgement.verdict)
                found[key] = judgement
        return [found[key] for key in keys]


# --- HTTP --------------------------------------------------------------------------------------------------------


def create_app(service: VerifierService, *, token: str | None) -> FastAPI:
    """The application that serves `service`, started and closed with it; every route but /health wants the `token`."""

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
        return _json(service.status())

    @app.post(wire.DRAIN)
    async def drain() -> Response:
        return _json(Draining(service.drain()))

    def begin(request: VerifyRequest) -> HeartbeatRoute.Work:
        return service.judge(service.admit(request), request)

    app.router.routes.append(Route(wire.VERIFY, HeartbeatRoute(VerifyRequest, begin), methods=["POST"]))
    refuse_in_one_shape(app)
    guard(app, token=token)
    return app


def _json(value: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
