"""`VerifierService` and its application: judges actors' answers with the same verifiers that an actor would use.

If the client of a request disconnects, the request is abandoned and the workers that judge it are killed. If a domain's
verifier is deterministic (`ServedDomain.kept`), equal answers to one problem are judged once, and verdicts are cached.

| waits for | at most | unblocked by |
|---|---|---|
| a verdict | the verifier's own deadline | its worker, which the deadline kills |
| the client, to read the response | – | the client reads, leaves or dies |
| a drain | – | the last verdict; to end it early, send SIGTERM |
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Final

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response
from starlette.routing import Route

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
from pipelinerl.system.http_service import (
    MOST_WAITING,
    Backlog,
    HeartbeatRoute,
    RequestRefused,
    guard,
    json_response,
    refuse_in_one_shape,
)
from pipelinerl.types import Problem, Verdict
from pipelinerl.verifiers.verdicts import judged
from pipelinerl.verifiers.verifier import Judgement, SampledAnswer, start

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
    """Cache of verdicts by the keys that `keys_of` returns, in at most `most_bytes`; verifier failures are not cached.

    The least recently used entry is evicted first. With a `most_bytes` of 0, nothing is cached.
    """

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
        self._domains = dict(domains)
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
    def rules(self) -> Mapping[str, str]:
        """The digest of each domain's judging rules, by domain."""
        return {name: domain.rules for name, domain in self._domains.items()}

    @property
    def state(self) -> str:
        """State of the service: `ready` or `draining`."""
        return "draining" if self.closing.is_set() else "ready"

    async def start(self) -> None:
        """Start all verifiers; a failure is reported when the first answer is judged."""
        await asyncio.gather(*(start(domain.verifier) for domain in self._domains.values()))
        self.started.set()

    async def close(self) -> None:
        for domain in self._domains.values():
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
        domain = self._domains.get(request.domain)
        if domain is None:
            known = ", ".join(self._domains) or "none"
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
        """Return the service's domains and load."""
        domains = {
            name: DomainStatus(rules=domain.rules, tier=domain.tier, kept=domain.kept)
            for name, domain in self._domains.items()
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
