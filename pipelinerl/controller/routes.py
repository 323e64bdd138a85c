"""The controller's HTTP API as values: its paths, and what is asked and answered, for `service/api.py` and `client.py`.

GET    /health            liveness, without a token
GET    /status            → `RunStatus`
GET    /metrics           the run in Prometheus' text form
GET    /knobs             → `KnobsAnswer`: values and the log of changes
PATCH  /knobs             {"k": 4, …} → `KnobsAnswer`; 422 with one sentence when they cannot run
GET    /assignment        → `ActorAssignment`: what an actor works by
GET    /engines           → `FleetStatus`
POST   /engines           `EngineOffer` → `EngineTaken`: an engine joins; 422 for a loopback address of another machine,
                          and where no engine answers
POST   /engines/request   `EngineStart` → `EngineNames`: the launcher starts engines; 409 when the one to be replaced is
                          to go already
POST   /engines/drain     `EngineDrain` → `Done`: an engine ends what it has, and is taken out
DELETE /engines?engine=…  → `Done`: an engine is taken out; only its next life, or an offer without incarnation, brings
                          it back
POST   /verifiers         `VerifierOffer` → `Done`: a verifier service is there, for `LEASE_S` unless it says so again
DELETE /verifiers?url=…   → `Done`: one gets nothing new
POST   /stop              → `Done`: end the run at the next step boundary

An engine is named by its URL or by its name. What is taken out and was started by the launcher is ended by it. The
header `x-who` says who asks, for the log of changes. Refusals have OpenAI's shape, `Refusal`.

Questions are checked by the controller alone, so that there is one sentence for each mistake.
"""

from __future__ import annotations

import math
from reprlib import repr as short
from typing import Annotated, Any, Final

import msgspec
from pydantic import AfterValidator, BaseModel, Field

from inference_contract.weights import can_be_looked_up
from pipelinerl.controller.state.knobs import KnobChange
from pipelinerl.verifiers.service.wire import VerifierLease

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
#: The header that says who asks, and what a launcher says there.
WHO: Final = "x-who"
LAUNCHER: Final = "the launcher"

#: How long what an engine has may run on when the engine is to go, in seconds, unless its operator says otherwise.
GRACE_S: Final = 60.0


#: A base URL as somebody writes it, with a slash behind or without: no path, no query, no secret.
_OfferedUrl = Annotated[
    str, Field(pattern=r"^https?://[^/?#@\s]+/?$", max_length=256), AfterValidator(can_be_looked_up)
]
_Name = Annotated[str, Field(max_length=64)]


def _plain_json(changes: dict[str, Any]) -> dict[str, Any]:
    """Refuse what Python's reader takes and JSON cannot carry: NaN, infinite numbers and halves of surrogate pairs.

    No bound on k is the text `inf`.
    """
    for name, value in changes.items():
        each = value if isinstance(value, dict) else {"": value}
        for inner, number in each.items():
            if isinstance(number, float) and not math.isfinite(number):
                raise ValueError(f"{short(name)} must be a finite number (no bound on k is the text inf), got {number}")
            if not all(_is_unicode(text) for text in (name, inner, number) if isinstance(text, str)):
                raise ValueError(f"{short(name)} and its value must be Unicode text, got half of a surrogate pair")
    return changes


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


#: New values by knob, as a request's body.
KnobChanges = Annotated[dict[str, Any], AfterValidator(_plain_json)]
#: Recipes bound no domain's name; every actor is told those of every verifier service.
_DomainName = Annotated[str, Field(max_length=256)]
#: A verifier service that has not been heard of for so many seconds is given nothing new.
LEASE_S: Final = 15.0
_Grace = Annotated[float, Field(ge=0, le=86_400)]
#: How often an engine offers itself, in seconds, in a fleet of `OFFERS_AT_ONCE` at most: of a larger one each does it
#: more rarely, so that offers cost the controller the same.
OFFER_S: Final = 2.0
OFFERS_AT_ONCE: Final = 32


class EngineOffer(BaseModel):
    """An engine that is running.

    Attributes:
        url: where others reach it.
        incarnation: tells one life of it from the next; empty when an operator offers it.
        name: what it calls itself.
        type: its name in the registry of engines.
    """

    url: _OfferedUrl
    incarnation: _Name = ""
    name: _Name = ""
    type: _Name = ""


class VerifierOffer(BaseModel):
    """A verifier service that is running.

    Attributes:
        url: where actors reach it.
        incarnation: tells one life of it from the next.
        domains: by name, the digest of the rules by which it judges.
    """

    url: _OfferedUrl
    incarnation: Annotated[str, Field(min_length=1, max_length=64)]
    domains: Annotated[dict[_DomainName, Annotated[str, Field(max_length=64)]], Field(min_length=1, max_length=256)]


class EngineStart(BaseModel):
    """Engines that the launcher is to start.

    Attributes:
        type: their name in the registry of engines.
        count: how many.
        replaces: URL or name of an engine that is drained once the new one serves; empty for none.
        grace_s: how long what that one has may run on, in seconds.
    """

    type: Annotated[str, Field(pattern=r"^[a-z0-9_]{1,32}$")]
    count: Annotated[int, Field(ge=1, le=64)] = 1
    replaces: str = ""
    grace_s: _Grace = GRACE_S


class EngineDrain(BaseModel):
    """An engine, by URL or name, that is to go once it has ended what it has, or after `grace_s` seconds."""

    engine: str
    grace_s: _Grace = GRACE_S


class ActorAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor works by: engines, concurrency, and when a rollout is fresh."""

    serving: tuple[str, ...]
    """Base URLs of the engines that may be given work."""
    finishing: tuple[str, ...]
    """Base URLs of those that may end what they have, and are given nothing new."""
    groups_in_flight: int
    """How many groups each actor may hold."""
    model_version: int
    """The trainer's newest version."""
    k: float | None
    """How many versions old a rollout may be at its step; None where there is no bound, which JSON cannot say."""
    verifiers: tuple[VerifierLease, ...] = ()
    """The verifier services that answers may be sent to."""

    @property
    def staleness_bound(self) -> float:
        """`k` as a number: infinity where there is no bound."""
        return math.inf if self.k is None else self.k


class KnobsAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The knobs of a live run."""

    knobs: dict[str, Any]
    """Values by name."""
    log: list[KnobChange] = []
    """Every change so far, the oldest first."""
    effective: str = ""
    """When a change that was just made takes effect."""


class EngineNames(msgspec.Struct, frozen=True):
    """Names of the engines that will be started."""

    names: tuple[str, ...]


class EngineTaken(msgspec.Struct, frozen=True, omit_defaults=True):
    """An engine is known (`joining`), or its address has to wait (`waiting`).

    It offers itself again after `again_s`.
    """

    state: str
    again_s: float = OFFER_S


class Done(msgspec.Struct, frozen=True):
    """What became of a question that has no other answer: `joining`, `draining`, `removed`, `stopping`."""

    state: str


class RefusalReason(msgspec.Struct, frozen=True):
    """Why a question was refused, in one sentence."""

    message: str


class Refusal(msgspec.Struct, frozen=True):
    """The body of an answer that is not a success."""

    error: RefusalReason
