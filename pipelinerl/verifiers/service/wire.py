"""What is asked of a verifier service, and what it answers: paths and values, the same at both ends.

GET  /health     liveness, without a token
GET  /status     → `ServiceStatus`: domains, what is being judged, the cache
POST /verify     `VerifyRequest` → `VerifyAnswer`: the verdicts on the answers to one problem, in their order. Spaces
                 may come before it, one each second, by which a service that works is told from one that does not
POST /drain      → `Draining`: nothing new is taken; the process ends once it has given its last verdict

Bodies are JSON. What cannot be judged here has OpenAI's shape of refusal and one of the codes below; that another
service may judge is said by the status: 404, 409 and 5xx, as against 400, 413 and 422.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pipelinerl.types import Problem, Verdict
from pipelinerl.verifiers.verifier import Judgement, SampledAnswer

#: The number of this agreement; it rises with each change that the other end has to know of.
PROTOCOL: Final = 1

HEALTH: Final = "/health"
STATUS: Final = "/status"
VERIFY: Final = "/verify"
DRAIN: Final = "/drain"

#: Codes of refusals.
OTHER_PROTOCOL: Final = "other_protocol"
UNKNOWN_DOMAIN: Final = "unknown_domain"
OTHER_RULES: Final = "other_rules"
IS_DRAINING: Final = "draining"
IS_FULL: Final = "full"

_MOST_ANSWERS: Final = 4096


class VerifyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Answers to one problem of a domain; `rules` is the digest of how that domain judges (`LeaseOffer`)."""

    protocol: int
    domain: str
    rules: str
    problem: Problem
    answers: Annotated[tuple[SampledAnswer, ...], Meta(min_length=1, max_length=_MOST_ANSWERS)]


class JudgedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict, and the seconds that it took; 0 where it was known."""

    verdict: Verdict
    seconds: Annotated[float, Meta(ge=0)]


class VerifyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict for each answer, in their order."""

    judged: tuple[JudgedAnswer, ...]

    @property
    def judgements(self) -> list[Judgement]:
        """As a `GroupVerifier` gives them."""
        return [Judgement(each.verdict, each.seconds) for each in self.judged]


class DomainStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a domain is judged here: the digest of its rules, its sandbox if it has one, whether verdicts are kept."""

    rules: str
    tier: str
    kept: bool


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a service is doing.

    Attributes:
        queue: answers that were taken and have no verdict yet.
        verdicts, hits: verdicts given, and how many of them were known.
        cache_bytes: what the known ones take.
    """

    protocol: int
    version: str
    state: str
    domains: Mapping[str, DomainStatus]
    queue: int
    verdicts: int
    hits: int
    cache_bytes: int


class Draining(msgspec.Struct, frozen=True):
    """How many answers still wait for their verdicts."""

    queue: int


class VerifierLease(msgspec.Struct, frozen=True, kw_only=True):
    """A service that actors may use: its base URL, which life of it, and the digest of the rules of each domain."""

    url: str
    incarnation: str
    domains: Mapping[str, str]
