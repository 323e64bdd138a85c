"""Paths, requests and responses of the controller's HTTP API, used by `service/api.py` and `client.py`.

    GET    /health            liveness; needs no token
    GET    /status            → `RunStatus`
    GET    /metrics           metrics of the run in Prometheus' text format
    GET    /knobs             → `KnobsAnswer`: values and the log of changes
    PATCH  /knobs             {"k": 4, …} → `KnobsAnswer`; 422 with one sentence if the run cannot continue with them
    GET    /assignment        → `ActorAssignment`: settings for actors
    GET    /engines           → `FleetStatus`
    POST   /engines           `EngineOffer` → `EngineTaken`: add an engine; 422 for a loopback address sent from
                              another machine, and if no engine answers at the address
    POST   /engines/request   `EngineStart` → `EngineNames`: have the launcher start engines; 409 if the engine to be
                              replaced is leaving already
    POST   /engines/drain     `EngineDrain` → `Done`: remove an engine once its current work is finished
    DELETE /engines?engine=…  → `Done`: remove an engine; only a new process (incarnation), or an operator's
                              `EngineOffer`, readmits it
    POST   /verifiers         `VerifierOffer` → `Done`: add a verifier service for `LEASE_S`; a repeated offer extends
                              that time
    DELETE /verifiers?url=…   → `Done`: send a verifier service no new work
    POST   /stop              → `Done`: end the run at the next step boundary
    POST   /suspend           → `Done`: save the state after the current step and end the run

Engines are identified by URL or name. If a removed engine was started by the launcher, the launcher ends its process.
The header `x-who` names the caller, for the knob log. Errors have OpenAI's format, `Refusal`. Only the controller
validates requests, so every client shows the same message for a mistake.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from reprlib import repr as short
from typing import Annotated, Any, Final

import msgspec
from pydantic import AfterValidator, BaseModel, Field

from inference_contract.weights import can_be_looked_up
from pipelinerl.controller.state.knobs import KnobChange
from pipelinerl.errors import SURROGATE

STATUS: Final = "/status"
METRICS: Final = "/metrics"
KNOBS: Final = "/knobs"
ASSIGNMENT: Final = "/assignment"
ENGINES: Final = "/engines"
ENGINES_REQUEST: Final = "/engines/request"
ENGINES_DRAIN: Final = "/engines/drain"
VERIFIERS: Final = "/verifiers"
STOP: Final = "/stop"
SUSPEND: Final = "/suspend"
#: HTTP header in which a client states its name, and the launcher's name.
WHO: Final = "x-who"
LAUNCHER: Final = "the launcher"

#: Default time in seconds for which a leaving engine may continue its current work.
GRACE_S: Final = 60.0


class VerifierLease(msgspec.Struct, frozen=True, kw_only=True):
    """A service that actors may use: its base URL, an id that changes if it restarts, and digests of domains' rules."""

    url: str
    incarnation: str
    domains: Mapping[str, str]


#: Type of a base URL as users write it: a trailing slash is allowed, but no path, query or credentials.
_OfferedUrl = Annotated[
    str, Field(pattern=r"^https?://[^/?#@\s]+/?$", max_length=256), AfterValidator(can_be_looked_up)
]
_Name = Annotated[str, Field(max_length=64)]


def _plain_json(changes: dict[str, Any]) -> dict[str, Any]:
    """Reject values that Python's parser accepts but JSON cannot represent: NaN, infinities and lone surrogates."""
    for name, value in changes.items():
        each = value if isinstance(value, dict) else {"": value}
        for inner, number in each.items():
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{short(name)} must be a finite number (no bound on k is the text inf), got {number}")
            if any(SURROGATE.search(text) for text in (name, inner, number) if isinstance(text, str)):
                raise ValueError(f"{short(name)} and its value must be Unicode text, got half of a surrogate pair")
    return changes


#: New values by knob name, as a request body.
KnobChanges = Annotated[dict[str, Any], AfterValidator(_plain_json)]
#: Type of a domain's name. Its length is limited because every actor receives the domains of all verifier services.
_DomainName = Annotated[str, Field(max_length=256)]
#: Lifetime in seconds of a verifier service's registration. Each `POST /verifiers` of the service renews it; after that
#: time without renewal, the service gets no new work.
LEASE_S: Final = 15.0
_Grace = Annotated[float, Field(ge=0, le=86_400)]
#: Seconds after which an engine repeats its offer to join the fleet (`POST /engines`), if the fleet has at most
#: `OFFERS_AT_ONCE` engines. In larger fleets the interval grows in proportion, so the controller's load stays the same.
OFFER_S: Final = 2.0
OFFERS_AT_ONCE: Final = 32


class EngineOffer(BaseModel):
    """Request of an engine to join the fleet; if `incarnation` (its process) is empty, an operator sends it."""

    url: _OfferedUrl
    incarnation: _Name = ""
    name: _Name = ""
    type: _Name = ""


class VerifierOffer(BaseModel):
    """Request of a verifier service to be used; `domains` maps each domain to the digest of its judging rules."""

    url: _OfferedUrl
    incarnation: Annotated[str, Field(min_length=1, max_length=64)]
    domains: Annotated[dict[_DomainName, Annotated[str, Field(max_length=64)]], Field(min_length=1, max_length=256)]


class EngineStart(BaseModel):
    """A request for the launcher to start engines of one type.

    The engine `replaces` (URL or name), if any, is drained within `grace_s` seconds once the new engine serves.
    """

    type: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,32}$")]
    count: Annotated[int, Field(ge=1, le=64)] = 1
    replaces: str = ""
    grace_s: _Grace = GRACE_S


class EngineDrain(BaseModel):
    """A request to remove an engine (URL or name) once its work is finished, at the latest after `grace_s` seconds."""

    engine: str
    grace_s: _Grace = GRACE_S


class ActorAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """Response to an actor: engines and verifier services to use, its concurrency, and the staleness bound."""

    serving: tuple[str, ...]
    """Base URLs of the engines that may be given work."""
    finishing: tuple[str, ...]
    """Base URLs of engines that finish their work and get no new work, except evaluation prompts that name one."""
    groups_in_flight: int
    model_version: int
    speeds: dict[str, float] = {}
    """Speeds of the serving engines that differ from the fleet's, as a factor: 0.5 is half as fast."""
    k: float | None
    """Staleness bound k in versions; None if unbounded, since JSON has no infinity."""
    verifiers: tuple[VerifierLease, ...] = ()

    @property
    def staleness_bound(self) -> float:
        """The bound k as a number: infinity if staleness is unbounded."""
        return math.inf if self.k is None else self.k


class KnobsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Response with the knobs of a live run: their current values, and the log of their changes."""

    knobs: dict[str, Any]
    log: list[KnobChange] = []
    """All changes so far, oldest first."""
    effective: str = ""
    """When the requested change takes effect, in words; empty if no change was requested."""


class EngineNames(msgspec.Struct, frozen=True):
    """Names of the engines that the launcher will start."""

    names: tuple[str, ...]


class EngineTaken(msgspec.Struct, frozen=True, omit_defaults=True):
    """Response to an `EngineOffer`.

    `state` is `joining` if the engine is now in the fleet, or `waiting` if the controller admits no new process at its
    address yet. The engine sends its offer again after `again_s` seconds. It computes on `cores`, which it shares with
    the trainer in turn, or on its own if there are none.
    """

    state: str
    again_s: float = OFFER_S
    cores: tuple[int, ...] = ()


class Done(msgspec.Struct, frozen=True):
    """Response of a request that returns nothing but the new state: `joining`, `draining`, `removed` or `stopping`."""

    state: str


class RefusalReason(msgspec.Struct, frozen=True):
    """The reason for an error response, in one sentence."""

    message: str


class Refusal(msgspec.Struct, frozen=True):
    """The body of an error response."""

    error: RefusalReason
