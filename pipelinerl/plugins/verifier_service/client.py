"""`VerifierServices` and `RemoteVerifier`: send an actor's answers to the verifier services that are up.

A service fails if it is unreachable or silent, drops the connection, or answers 5xx or invalid data. Its requests are
then retried at other services for `grace_s`; after that, the answers are *masked* (`verifier_error`), never scored.
A failed service is avoided for a cooldown that grows with each failure, unless it restarts. Among services with nearly
the lowest load, a problem always prefers the same one, whose cache may hold verdicts on the problem's answers.

| waits for | at most | unblocked by |
|---|---|---|
| any service, while there is none | `grace_s`, then the answers are masked | the controller names a service |
| the next heartbeat of a judging service | `silence_s`, then another service is tried | a heartbeat each second |
| the verdicts of a service | `timeout_s`, then another service is tried | its verdicts |
| capacity in services that are full | – | verdicts |
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

import msgspec

from pipelinerl.controller.routes import VerifierLease
from pipelinerl.plugins.verifier_service import wire
from pipelinerl.plugins.verifier_service.wire import VerifyAnswer, VerifyRequest
from pipelinerl.system.http_client import KEEP_ALIVE_S, ServiceFailed, ServicePatience, error_of, hot_session, post
from pipelinerl.types import Problem, Verdict
from pipelinerl.verifiers.verifier import Judgement, SampledAnswer, failed

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger("pipelinerl")

_FIRST_REST_S: Final = 0.5
_LONGEST_REST_S: Final = 15.0
#: Seconds until a full service is retried or, without any service, until the list of services is checked again.
_LOOK_AGAIN_S: Final = 0.25
#: A service counts as having low load if it holds few more answers than the least loaded service. The allowed
#: difference is this number, or twice the number of answers in the request if that is larger.
_SLACK: Final = 64
#: A response may have this many bytes for each verdict with its reasons, plus the number of bytes below.
_BYTES_PER_VERDICT: Final = 64 << 10
_BYTES_BESIDE: Final = 1 << 20
#: Largest accepted reward; no verifier of this project gives a larger one.
_MOST_REWARD: Final = 1e9


class _ServiceFull(Exception):
    """The service already has its maximum number of answers to judge; a later attempt may succeed."""


class _RequestInvalid(Exception):
    """Every service would reject this request."""


@final
@dataclass(slots=True)
class _Service:
    lease: VerifierLease
    load: int = 0
    rest_s: float = 0.0
    rests_until: float = -math.inf

    def failed(self, now: float) -> None:
        self.rest_s = min(max(_FIRST_REST_S, 2 * self.rest_s), _LONGEST_REST_S)
        self.rests_until = now + self.rest_s

    def answered(self) -> None:
        self.rest_s, self.rests_until = 0.0, -math.inf


@final
@dataclass(slots=True)
class _Try:
    until: float = math.inf
    reason: str = "the controller has named no verifier service"
    refused: set[str] = field(default_factory=set)
    """Incarnations (ids of service processes) that answered 404 or 409, so that they would reject a retry as well."""

    def failed(self, reason: str, now: float, grace_s: float) -> None:
        """Record a failure; the first failure starts the grace period."""
        self.reason = reason
        self.until = min(self.until, now + grace_s)


@final
class VerifierServices:
    """The verifier services of a run. Use and close this object in a single event loop."""

    def __init__(self, *, token: str | None, patience: ServicePatience = ServicePatience()) -> None:
        self._token = token
        self._patience = patience
        self._services: dict[str, _Service] = {}
        self._session: aiohttp.ClientSession | None = None
        self._changed = asyncio.Event()

    def update(self, leases: Iterable[VerifierLease]) -> None:
        """Replace the list of services; a service that is no longer listed may still answer requests in flight."""
        known = self._services
        self._services = {}
        for lease in leases:
            service = known.get(lease.url)
            if service is None or service.lease.incarnation != lease.incarnation:
                service = _Service(lease)
                log.info("answers may be judged by the verifier service at %s", lease.url)
            service.lease = lease
            self._services[lease.url] = service
        for url in known.keys() - self._services.keys():
            log.info("the verifier service at %s gets no new requests", url)
        self._changed.set()
        self._changed = asyncio.Event()

    async def judge(
        self, domain: str, rules: str, problem: Problem, answers: Sequence[SampledAnswer]
    ) -> list[Judgement]:
        """Return the verdicts on answers to a problem, in order; mask the answers if no service can judge them."""
        request = VerifyRequest(
            protocol=wire.PROTOCOL, domain=domain, rules=rules, problem=problem, answers=tuple(answers)
        )
        try:
            body = msgspec.json.encode(request)
        except (TypeError, ValueError) as error:  # the metadata is not JSON, or a text has lone surrogates
            return _masked(f"the problem cannot be sent to a verifier service: {error}", len(answers))
        clock, tried = asyncio.get_running_loop().time, _Try()
        while True:
            service = self._chosen(request, body, tried, clock())
            if service is None:
                tried.failed(self._reason_for_none(request, tried), clock(), self._patience.grace_s)
                await self._wait(tried, clock())
            else:
                service.load += len(answers)
                try:
                    judgements = await self._verdicts_of(service, body, len(answers), tried)
                    service.answered()
                    return judgements
                except _RequestInvalid as error:
                    return _masked(str(error), len(answers))
                except _ServiceFull:
                    await asyncio.sleep(_LOOK_AGAIN_S)
                except ServiceFailed as error:
                    service.failed(clock())
                    tried.failed(str(error), clock(), self._patience.grace_s)
                finally:
                    service.load -= len(answers)
            if clock() >= tried.until:
                log.warning("%s: its answers are masked: %s", problem.problem_id, tried.reason)
                return _masked(tried.reason, len(answers))

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _chosen(self, request: VerifyRequest, body: bytes, tried: _Try, now: float) -> _Service | None:
        """Return the problem's preferred service among those with low load; None if no service can be used now."""
        able = [
            each
            for each in self._services.values()
            if each.lease.domains.get(request.domain) == request.rules
            and each.lease.incarnation not in tried.refused
            and now >= each.rests_until
        ]
        if not able:
            return None
        least = min(each.load for each in able)
        key = f"{request.domain}\0{request.problem.problem_id}".encode()
        return min(
            (each for each in able if each.load <= least + max(_SLACK, 2 * len(request.answers))),
            key=lambda each: hashlib.blake2b(key, key=each.lease.url.encode()[:64]).digest(),
        )

    def _reason_for_none(self, request: VerifyRequest, tried: _Try) -> str:
        if tried.until < math.inf:
            return tried.reason
        judging = [each.lease for each in self._services.values() if request.domain in each.lease.domains]
        if judging and all(lease.domains[request.domain] != request.rules for lease in judging):
            urls = ", ".join(lease.url for lease in judging)
            return f"{urls} judge {request.domain} by another recipe than this actor's; start both from the same one"
        return f"no verifier service of this run judges {request.domain} now"

    async def _wait(self, tried: _Try, now: float) -> None:
        wakes = [each.rests_until for each in self._services.values() if each.rests_until > now]
        wakes.append(now + _LOOK_AGAIN_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(min(*wakes, tried.until)):
                await self._changed.wait()

    async def _verdicts_of(self, service: _Service, body: bytes, count: int, tried: _Try) -> list[Judgement]:
        """Request `count` verdicts. Raises `ServiceFailed`, `_ServiceFull` or `_RequestInvalid`, with the URL."""
        if self._session is None:
            self._session = hot_session(token=self._token, keep_alive_s=KEEP_ALIVE_S)
        url = service.lease.url + wire.VERIFY
        most_bytes = _BYTES_BESIDE + _BYTES_PER_VERDICT * count
        status, content = await post(self._session, url, body, most_bytes=most_bytes, patience=self._patience)
        if status != 200:
            raise self._refusal(service, url, status, content, tried)
        return _judgements(content, count, url)

    def _refusal(self, service: _Service, url: str, status: int, content: bytes, tried: _Try) -> Exception:
        message, code = error_of(content)
        words = f"{url} refuses ({status}): {message}"
        if status == 503 and code == wire.IS_FULL:
            return _ServiceFull(words)
        if status in (404, 409):
            tried.refused.add(service.lease.incarnation)
        return _RequestInvalid(words) if status in (400, 413, 422) else ServiceFailed(words)


@final
class RemoteVerifier:
    """A `GroupVerifier` that sends a domain's answers to the run's services, which judge them within deadlines."""

    def __init__(self, services: VerifierServices, *, domain: str, rules: str) -> None:
        self._services = services
        self._domain = domain
        self._rules = rules

    async def judge(self, problem: Problem, answers: Sequence[SampledAnswer]) -> list[Judgement]:
        """Send all answers to one service."""
        return await self._services.judge(self._domain, self._rules, problem, answers)

    async def close(self) -> None:
        """Do nothing: the connections to services are shared by all domains."""


def _judgements(content: bytes, count: int, url: str) -> list[Judgement]:
    """Parse the response. Raises `ServiceFailed` unless it holds one valid verdict per answer."""
    try:
        judgements = msgspec.json.decode(content, type=VerifyAnswer).judgements
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ServiceFailed(f"{url} is not a verifier service: {error}") from None
    if len(judgements) != count:
        raise ServiceFailed(f"{url} gave {len(judgements)} verdicts on {count} answers")
    for verdict, _ in judgements:
        rewards = (verdict.reward, *(part.reward for part in verdict.parts))
        if not all(math.isfinite(reward) and abs(reward) <= _MOST_REWARD for reward in rewards):
            raise ServiceFailed(f"{url} gave a reward that is not a number within ±{_MOST_REWARD:g}")
    return judgements


def _masked(reason: str, count: int) -> list[Judgement]:
    verdict: Verdict = failed(reason)
    return [Judgement(verdict, 0.0)] * count
