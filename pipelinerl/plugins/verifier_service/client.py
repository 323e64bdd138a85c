"""`VerifierServices` and `RemoteVerifier`: send an actor's answers to the verifier services that are up.

If a service fails (`system/service_client.py`), or gives invalid verdicts, its requests are retried at other services
for `grace_s`; after that, the answers are *masked* (`verifier_error`), never scored.
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
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from pipelinerl.controller.routes import VerifierLease
from pipelinerl.plugins.verifier_service import wire
from pipelinerl.plugins.verifier_service.wire import VerifyAnswer, VerifyRequest
from pipelinerl.system.service_client import (
    Grace,
    RequestRejected,
    ServiceClient,
    ServiceFailed,
    ServiceFull,
    ServicePatience,
)
from pipelinerl.types import Problem, Verdict
from pipelinerl.verifiers.verifier import Judgement, SampledAnswer, failed

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


#: Statuses with which every service would reject the same request.
_INVALID: Final = (400, 413, 422)
#: Statuses with which a service rejects each retry of a request that another service may accept.
_ELSEWHERE: Final = (404, 409)
_NONE_NAMED: Final = "the controller has named no verifier service"


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


class VerifierServices:
    """The verifier services of a run. Use and close this object in a single event loop."""

    def __init__(self, *, token: str | None, patience: ServicePatience = ServicePatience()) -> None:
        self._client = ServiceClient("a verifier service", token=token, patience=patience)
        self._services: dict[str, _Service] = {}
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

    def verifier(self, domain: str, rules: str) -> RemoteVerifier:
        """Return the verifier of a domain that is judged by `rules`, a digest."""
        return RemoteVerifier(self, domain=domain, rules=rules)

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
        grace, refused = Grace(self._client.patience.grace_s, reason=_NONE_NAMED), set[str]()
        while True:
            service = self._chosen(request, refused)
            if service is None:
                grace.failed(self._reason_for_none(request, grace))
                now = time.monotonic()
                wakes = [each.rests_until for each in self._services.values() if each.rests_until > now]
                wait_s = min(*wakes, now + _LOOK_AGAIN_S, grace.until) - now
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._changed.wait()
            else:
                service.load += len(answers)
                try:
                    judgements = await self._verdicts_of(service, body, len(answers), refused)
                    service.answered()
                    return judgements
                except RequestRejected as error:
                    return _masked(str(error), len(answers))
                except ServiceFull:
                    await asyncio.sleep(_LOOK_AGAIN_S)
                except ServiceFailed as error:
                    service.failed(time.monotonic())
                    grace.failed(str(error))
                finally:
                    service.load -= len(answers)
            if grace.is_over():
                log.warning("%s: its answers are masked: %s", problem.problem_id, grace.reason)
                return _masked(grace.reason, len(answers))

    async def close(self) -> None:
        await self._client.close()

    def _chosen(self, request: VerifyRequest, refused: set[str]) -> _Service | None:
        """Return the problem's preferred service among those with low load; None if no service can be used now.

        `refused` are the incarnations (ids of service processes) that would reject a retry of this request.
        """
        now = time.monotonic()
        able = [
            each
            for each in self._services.values()
            if each.lease.domains.get(request.domain) == request.rules
            and each.lease.incarnation not in refused
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

    def _reason_for_none(self, request: VerifyRequest, grace: Grace) -> str:
        if grace.until < math.inf:
            return grace.reason
        judging = [each.lease for each in self._services.values() if request.domain in each.lease.domains]
        if judging and all(lease.domains[request.domain] != request.rules for lease in judging):
            urls = ", ".join(lease.url for lease in judging)
            return f"{urls} judge {request.domain} by another recipe than this actor's; start both from the same one"
        return f"no verifier service of this run judges {request.domain} now"

    async def _verdicts_of(self, service: _Service, body: bytes, count: int, refused: set[str]) -> list[Judgement]:
        """Request `count` verdicts. Raises `ServiceFailed`, `ServiceFull`, or `RequestRejected` if no service helps."""
        url = service.lease.url + wire.VERIFY
        most_bytes = _BYTES_BESIDE + _BYTES_PER_VERDICT * count
        try:
            answer = await self._client.post(url, body, VerifyAnswer, most_bytes=most_bytes)
        except RequestRejected as error:
            if error.status in _INVALID:
                raise
            if error.status in _ELSEWHERE:
                refused.add(service.lease.incarnation)
            raise ServiceFailed(str(error)) from None
        judgements = answer.judgements
        if len(judgements) != count:
            raise ServiceFailed(f"{url} gave {len(judgements)} verdicts on {count} answers")
        for verdict, _ in judgements:
            rewards = (verdict.reward, *(part.reward for part in verdict.parts))
            if not all(math.isfinite(reward) and abs(reward) <= _MOST_REWARD for reward in rewards):
                raise ServiceFailed(f"{url} gave a reward that is not a number within ±{_MOST_REWARD:g}")
        return judgements


class RemoteVerifier:
    """A `GroupVerifier` that sends a domain's answers to the run's services, which judge them within deadlines."""

    def __init__(self, services: VerifierServices, *, domain: str, rules: str) -> None:
        self._services = services
        self._domain = domain
        self._rules = rules

    async def judge(self, problem: Problem, answers: Sequence[SampledAnswer]) -> list[Judgement]:
        return await self._services.judge(self._domain, self._rules, problem, answers)

    async def close(self) -> None:
        """Do nothing: the connections to services are shared by all domains."""


def _masked(reason: str, count: int) -> list[Judgement]:
    verdict: Verdict = failed(reason)
    return [Judgement(verdict, 0.0)] * count
