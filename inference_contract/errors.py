"""The tree of errors that an engine may answer with.

    ContractError                 500 internal_error
    ├── NotFinite                 500 not_finite              NaN or infinity in the logits for this prompt
    ├── InvalidRequest            400 invalid_request_error   the body is invalid; `param` names the field
    │   └── ContextExceeded       400 context_length_exceeded the prompt leaves no room for a token; OpenAI's code
    ├── Unauthorized              401 unauthorized            the bearer token is missing or wrong
    ├── UnknownModel              404 model_not_found
    ├── Conflict                  409
    │   ├── StaleGeneration       409 stale_generation        a process group older than the one joined
    │   ├── StaleVersion          409 stale_version           a weight version older than the one served
    │   ├── UpdateInProgress      409 update_in_progress      another update is under way
    │   └── NotPrepared           409 not_prepared            no earlier prepare, no process group, or no such version
    ├── LayoutMismatch            422 layout_mismatch         names, order or shapes differ from the model's, or a dtype
    │                                                         that the engine does not convert
    ├── OutOfRange                422 out_of_range            a value exceeds the range of the engine's dtype
    ├── Overloaded                429 overloaded              the waiting queue is full
    ├── Dirty                     503 dirty                   a weight swap failed midway; a full update repairs this
    ├── EngineStopped             503 engine_stopped          the engine is closing
    ├── DigestMismatch            502 digest_mismatch         the received bytes differ from those sent
    ├── PeerLost                  502 peer_lost               another rank left or died during a join or a broadcast
    └── DeadlineExceeded          504 deadline_exceeded       a peer did not respond in time

Each class states in `persistence` if a retry of the same request can succeed, so that clients need not infer it from
the status. PERMANENT errors come from how the engine or the client was started, and no retry helps: InvalidRequest,
Unauthorized, UnknownModel, LayoutMismatch, OutOfRange. All others are TRANSIENT.

To add an error, subclass the nearest parent and set `status`, `code` and, if no retry helps, `persistence`; then add a
line above. On the wire an error has OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`. `from_wire`
restores the same class on the client. `known` of some errors has numbers such as the engine's current generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar


class Persistence(StrEnum):
    """Classes of errors: after a TRANSIENT error the same request may succeed later, after a PERMANENT one never."""

    TRANSIENT = "transient"
    """The same request may succeed later, or after a restart of the engine."""
    PERMANENT = "permanent"
    """No retry succeeds: the engine or the client must be started differently."""


class ContractError(Exception):
    """Base class of all contract errors.

    `message` states what was expected, what arrived, and the remedy. `param` names the offending field. `known` holds
    numbers of the engine by name, such as its current generation, from which a client can continue.
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    persistence: ClassVar[Persistence] = Persistence.TRANSIENT

    def __init__(
        self, message: str, *, param: str | None = None, known: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.known = dict(known)

    def to_wire(self) -> dict[str, Any]:
        """Return the JSON body for this error."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error | ({"known": self.known} if self.known else {})}


class InvalidRequest(ContractError):
    """The body is malformed or requests something the engine does not support."""

    status = 400
    code = "invalid_request_error"
    persistence = Persistence.PERMANENT


class ContextExceeded(InvalidRequest):
    """The prompt leaves no room for a token. Only this prompt is too long: the client's other requests may succeed."""

    code = "context_length_exceeded"


class NotFinite(ContractError):
    """The model's logits for this request are NaN or infinite; any engine with the same weights would fail as well."""

    code = "not_finite"


class Unauthorized(ContractError):
    """The bearer token is missing or wrong."""

    status = 401
    code = "unauthorized"
    persistence = Persistence.PERMANENT


class UnknownModel(ContractError):
    """The request names a model that this engine does not serve."""

    status = 404
    code = "model_not_found"
    persistence = Persistence.PERMANENT


class Conflict(ContractError):
    """The request is well formed but conflicts with the engine's state."""

    status = 409
    code = "conflict"


class StaleGeneration(Conflict):
    """The process group is older than the one already joined.

    `known` holds the joined `generation`, and the highest `epoch` (number of the trainer process) that this engine has
    accepted. A trainer of this epoch or a later one continues with a higher generation.
    """

    code = "stale_generation"


class StaleVersion(Conflict):
    """The weight version is not newer than the one served."""

    code = "stale_version"


class UpdateInProgress(Conflict):
    """Another update is being received, or waits for its commit."""

    code = "update_in_progress"


class NotPrepared(Conflict):
    """A commit or abort without a prepare, a broadcast without a process group, or a version that a server lacks."""

    code = "not_prepared"


class LayoutMismatch(ContractError):
    """The announced parameters differ from the model's in name, order or shape, or have an unsupported dtype."""

    status = 422
    code = "layout_mismatch"
    persistence = Persistence.PERMANENT


class OutOfRange(ContractError):
    """A finite value is too large for the engine's dtype; the old weights stay in service."""

    status = 422
    code = "out_of_range"
    persistence = Persistence.PERMANENT


class Overloaded(ContractError):
    """The waiting queue is full; retry later or on another engine."""

    status = 429
    code = "overloaded"


class DigestMismatch(ContractError):
    """The received bytes do not match the announced digest; the old weights stay in service."""

    status = 502
    code = "digest_mismatch"


class PeerLost(ContractError):
    """Another rank of the process group left or died; the old weights stay in service, and a new group is needed."""

    status = 502
    code = "peer_lost"


class Dirty(ContractError):
    """The engine may hold a mix of old and new weights, and serves again only after a full update."""

    status = 503
    code = "dirty"


class EngineStopped(ContractError):
    """The engine is closing."""

    status = 503
    code = "engine_stopped"


class DeadlineExceeded(ContractError):
    """A peer that this request waited for did not respond in time; the message names it."""

    status = 504
    code = "deadline_exceeded"


def _tree(root: type[ContractError]) -> list[type[ContractError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


def has_error_shape(body: Any) -> bool:
    """Return True if this decoded JSON body is an engine's error, not the error of a proxy in front of it."""
    return isinstance(body, dict) and isinstance(body.get("error"), dict)


def from_wire(status: int, body: Any) -> ContractError:
    """Rebuild an engine's error as its own class; a body without the error shape gives a plain `ContractError`."""
    if not has_error_shape(body):
        return ContractError(f"expected a contract error body, got HTTP {status} with another body")
    error = body["error"]
    classes = {cls.code: cls for cls in _tree(ContractError)}
    cls = classes.get(str(error.get("code")), ContractError)
    reported = error.get("known")
    numbers = reported.items() if isinstance(reported, dict) else ()
    known = {str(name): number for name, number in numbers if type(number) is int}
    return cls(str(error.get("message")), param=error.get("param"), known=known)
