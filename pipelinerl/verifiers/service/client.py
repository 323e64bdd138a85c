"""`VerifierServices` and `RemoteVerifier`: an actor's answers judged by services, whichever of them live.

Promises: each answer has one verdict, however often a request had to be asked anew; a service that cannot be reached,
falls silent, breaks off, answers 5xx or answers what cannot be, is an infrastructure failure: the request goes to
another service, again and again for `grace_s`, and its answers are then *masked* (`verifier_error`), never scored.
What a service answers is bounded in size, and looked at before it is believed.

A service that failed is left alone for a while, longer each time, unless a new life of it is heard of. Of the others
that are about as little loaded as the least, a problem prefers always the same, which may know its answers already.

| waits for | at most | who unblocks it |
|---|---|---|
| a service, where there is none | `grace_s`, then the answers are masked | the controller names one |
| the next sign of life of a service that judges | `silence_s`, then another is asked | it beats each second |
| the verdicts of a service | `timeout_s`, then another is asked | it judges |
| room in services that are full | – | verdicts |
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

from pipelinerl.system.http_client import hot_session
from pipelinerl.types import Problem, Verdict
from pipelinerl.verifiers.service import wire
from pipelinerl.verifiers.service.asking import KEEP_ALIVE_S, ServiceFailed, ServicePatience, error_of, post
from pipelinerl.verifiers.service.wire import VerifierLease, VerifyAnswer, VerifyRequest
from pipelinerl.verifiers.verifier import Judgement, SampledAnswer, failed

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger("pipelinerl")

_FIRST_REST_S: Final = 0.5
_LONGEST_REST_S: Final = 15.0
#: How long a full service, and one that nobody has named yet, is waited for before it is looked for again.
_LOOK_AGAIN_S: Final = 0.25
#: A problem's preferred service may hold so many more answers of this actor than the least loaded one.
_SLACK: Final = 64
#: What an answer may take: names and reasons of some parts, and a little for the whole.
_BYTES_PER_VERDICT: Final = 64 << 10
_BYTES_BESIDE: Final = 1 << 20
#: Weighted sums of rewards that verifiers may give stay below it: a number beyond comes from no verifier of ours.
_MOST_REWARD: Final = 1e9


class _ServiceFull(Exception):
    """A service has no room just now."""


class _CannotBeAsked(Exception):
    """No service would judge this."""


@final
@dataclass(slots=True)
class _Service:
    """What is known of one service: its lease, the answers of ours that it holds, and until when it is left alone."""

    lease: VerifierLease
    load: int = 0
    rest_s: float = 0.0
    rests_until: float = -math.inf

    def failed(self, now: float) -> None:
        """Leave it alone for a while."""
        self.rest_s = min(max(_FIRST_REST_S, 2 * self.rest_s), _LONGEST_REST_S)
        self.rests_until = now + self.rest_s

    def answered(self) -> None:
        """Forget its failures."""
        self.rest_s, self.rests_until = 0.0, -math.inf


@final
@dataclass(slots=True)
class _Try:
    """What became of one request so far."""

    until: float = math.inf
    reason: str = "no verifier service has been named by the controller"
    refused: set[str] = field(default_factory=set)
    """Lives of services that will not judge it, whatever time passes."""

    def failed(self, reason: str, now: float, grace_s: float) -> None:
        """Note a failure; from the first on, time is short."""
        self.reason = reason
        self.until = min(self.until, now + grace_s)


@final
class VerifierServices:
    """The services of a run; used from one event loop, and closed in it."""

    def __init__(self, *, token: str | None, patience: ServicePatience = ServicePatience()) -> None:
        self._token = token
        self._patience = patience
        self._services: dict[str, _Service] = {}
        self._session: aiohttp.ClientSession | None = None
        self._changed = asyncio.Event()

    def update(self, leases: Iterable[VerifierLease]) -> None:
        """Use these from now on; what others have been asked already, they may still answer."""
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
            log.info("the verifier service at %s gets nothing new", url)
        self._changed.set()
        self._changed = asyncio.Event()

    async def judge(
        self, domain: str, rules: str, problem: Problem, answers: Sequence[SampledAnswer]
    ) -> list[Judgement]:
        """The verdicts on answers to a problem, in their order; masked where no service reaches them."""
        request = VerifyRequest(
            protocol=wire.PROTOCOL, domain=domain, rules=rules, problem=problem, answers=tuple(answers)
        )
        try:
            body = msgspec.json.encode(request)
        except (TypeError, ValueError) as error:  # metadata of no JSON type, half characters in a text
            return _masked(f"the problem cannot be sent to a verifier service: {error}", len(answers))
        clock, tried = asyncio.get_running_loop().time, _Try()
        while True:
            service = self._chosen(request, body, tried, clock())
            if service is None:
                tried.failed(self._nobody(request, tried), clock(), self._patience.grace_s)
                await self._wait(tried, clock())
            else:
                service.load += len(answers)
                try:
                    judgements = await self._asked(service, body, len(answers), tried)
                    service.answered()
                    return judgements
                except _CannotBeAsked as error:
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
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    def _chosen(self, request: VerifyRequest, body: bytes, tried: _Try, now: float) -> _Service | None:
        """Of the little loaded the one that this problem prefers; None where nobody can be asked now."""
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

    def _nobody(self, request: VerifyRequest, tried: _Try) -> str:
        """Why no service can be asked."""
        if tried.until < math.inf:
            return tried.reason
        judging = [each.lease for each in self._services.values() if request.domain in each.lease.domains]
        if judging and all(lease.domains[request.domain] != request.rules for lease in judging):
            urls = ", ".join(lease.url for lease in judging)
            return f"{urls} judge {request.domain} by another recipe than this actor's; start both from one"
        return f"no verifier service of this run judges {request.domain} now"

    async def _wait(self, tried: _Try, now: float) -> None:
        """Until services change, one has rested, or it is too late."""
        wakes = [each.rests_until for each in self._services.values() if each.rests_until > now]
        wakes.append(now + _LOOK_AGAIN_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(min(*wakes, tried.until)):
                await self._changed.wait()

    async def _asked(self, service: _Service, body: bytes, count: int, tried: _Try) -> list[Judgement]:
        """A service's verdicts.

        Raises:
            ServiceFailed, _ServiceFull, _CannotBeAsked: it gave none; the message names it.
        """
        if self._session is None:
            self._session = hot_session(token=self._token, keep_alive_s=KEEP_ALIVE_S)
        url = service.lease.url + wire.VERIFY
        most_bytes = _BYTES_BESIDE + _BYTES_PER_VERDICT * count
        status, content = await post(self._session, url, body, most_bytes=most_bytes, patience=self._patience)
        if status != 200:
            raise self._refusal(service, url, status, content, tried)
        return _judgements(content, count, url)

    def _refusal(self, service: _Service, url: str, status: int, content: bytes, tried: _Try) -> Exception:
        said, code = error_of(content)
        words = f"{url} refuses ({status}): {said}"
        if status == 503 and code == wire.IS_FULL:
            return _ServiceFull(words)
        if status in (404, 409):
            tried.refused.add(service.lease.incarnation)
        return _CannotBeAsked(words) if status in (400, 413, 422) else ServiceFailed(words)


@final
class RemoteVerifier:
    """Judges a domain's answers by the run's services. Its deadlines are the services' verifiers'."""

    def __init__(self, services: VerifierServices, *, domain: str, rules: str) -> None:
        self._services = services
        self._domain = domain
        self._rules = rules

    async def judge(self, problem: Problem, answers: Sequence[SampledAnswer]) -> list[Judgement]:
        """Judge them by one service."""
        return await self._services.judge(self._domain, self._rules, problem, answers)

    async def close(self) -> None:
        """Nothing is held: the services are everybody's."""


def _judgements(content: bytes, count: int, url: str) -> list[Judgement]:
    """What the body says. Raises `ServiceFailed` where it does not say one sane verdict for each answer."""
    try:
        judgements = msgspec.json.decode(content, type=VerifyAnswer).judgements
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ServiceFailed(f"what answers at {url} is no verifier service: {error}") from None
    if len(judgements) != count:
        raise ServiceFailed(f"{url} gave {len(judgements)} verdicts on {count} answers")
    for verdict, _ in judgements:
        rewards = (verdict.reward, *(part.reward for part in verdict.parts))
        if not all(math.isfinite(reward) and abs(reward) <= _MOST_REWARD for reward in rewards):
            raise ServiceFailed(f"{url} gave a reward that is no number within ±{_MOST_REWARD:g}")
    return judgements


def _masked(reason: str, count: int) -> list[Judgement]:
    verdict: Verdict = failed(reason)
    return [Judgement(verdict, 0.0)] * count
