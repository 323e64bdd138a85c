"""Routes and messages of a verifier service, shared by client and service, and `ServedDomain`.

    GET  /health     liveness, without a token
    GET  /status     → `ServiceStatus`: domains, load, the cache
    POST /verify     `VerifyRequest` → `VerifyAnswer`: the verdicts on the answers to one problem, in order. Before the
                     answer, the service sends a space each second as heartbeat
    POST /drain      → `Draining`: the service accepts no new requests; the process ends after its last verdict

Bodies are JSON. Errors have OpenAI's format and one of the codes below. After 404, 409 or 5xx, another service may
accept the request; after 400, 413 or 422, none would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pipelinerl.types import Problem, Verdict
from pipelinerl.verifiers.verifier import GroupVerifier, Judgement, SampledAnswer

#: Version of this protocol; incompatible changes increase it.
PROTOCOL: Final = 1

HEALTH: Final = "/health"
STATUS: Final = "/status"
VERIFY: Final = "/verify"
DRAIN: Final = "/drain"

#: Error codes of rejected requests.
UNKNOWN_DOMAIN: Final = "unknown_domain"
OTHER_RULES: Final = "other_rules"
IS_DRAINING: Final = "draining"

_MOST_ANSWERS: Final = 4096


class VerifyRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Answers to one problem of a domain; `rules` is the digest of the domain's judging rules."""

    protocol: int
    domain: str
    rules: str
    problem: Problem
    answers: Annotated[tuple[SampledAnswer, ...], Meta(min_length=1, max_length=_MOST_ANSWERS)]


class JudgedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict, and the seconds spent on it, which are 0 if it was cached."""

    verdict: Verdict
    seconds: Annotated[float, Meta(ge=0)]


class VerifyAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict for each answer, in order."""

    judged: tuple[JudgedAnswer, ...]

    @property
    def judgements(self) -> list[Judgement]:
        """The verdicts and seconds in the form that a `GroupVerifier` returns."""
        return [Judgement(each.verdict, each.seconds) for each in self.judged]


class DomainStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A service's domain: the digest of its rules, the tier of its sandbox or "", and whether verdicts are cached."""

    rules: str
    tier: str
    kept: bool


class ServiceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of a service: `queue` is the number of waiting answers, `hits` the number of `verdicts` from the cache."""

    protocol: int
    version: str
    state: str
    domains: Mapping[str, DomainStatus]
    queue: int
    verdicts: int
    hits: int
    cache_bytes: int


class Draining(msgspec.Struct, frozen=True):
    """Response to a drain: the number of answers that still wait for their verdicts."""

    queue: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDomain:
    """A domain that this service judges.

    `rules` is the digest of the part of the recipe that defines judging; requests with another digest are rejected.
    `kept` is True if the verifier is deterministic, so that verdicts can be cached. `tier` is the tier of the
    verifier's sandbox, if it has one.
    """

    verifier: GroupVerifier
    rules: str
    kept: bool
    tier: str = ""
