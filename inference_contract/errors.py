"""The errors an engine may answer with, as one tree.

    ContractError                 500 internal_error
    ├── NotFinite                 500 not_finite              NaN or infinity in the logits for this prompt
    ├── InvalidRequest            400 invalid_request_error   the body is wrong; `param` names the field
    │   └── ContextExceeded       400 context_length_exceeded the prompt leaves no room for a token; OpenAI's code
    ├── Unauthorized              401 unauthorized            no token, or the wrong one
    ├── UnknownModel              404 model_not_found
    ├── Conflict                  409
    │   ├── StaleGeneration       409 stale_generation        a process group older than the one joined
    │   ├── StaleVersion          409 stale_version           a weight version older than the one served
    │   ├── UpdateInProgress      409 update_in_progress      another update holds the second buffer
    │   └── NotPrepared           409 not_prepared            commit or broadcast without its prepare
    ├── LayoutMismatch            422 layout_mismatch         names, order or shapes differ from the model's, or a dtype
    │                                                         that the engine does not convert
    ├── OutOfRange                422 out_of_range            a value that the engine's own dtype cannot hold
    ├── Overloaded                429 overloaded              the waiting queue is full
    ├── Dirty                     503 dirty                   a half-received update; a full one mends it
    ├── EngineStopped             503 engine_stopped          the engine is closing
    ├── DigestMismatch            502 digest_mismatch         what arrived is not what was sent
    ├── PeerLost                  502 peer_lost               another rank left or died during a join or a broadcast
    └── DeadlineExceeded          504 deadline_exceeded       a peer did not come in time

Each says whether the same request may be answered later (`persistence`): nobody has to guess it from a status. What is
PERMANENT comes of how engine and client were started, and so no retry mends it: InvalidRequest, Unauthorized,
UnknownModel, LayoutMismatch, OutOfRange. All else is TRANSIENT.

To add one: subclass the nearest parent, set `status`, `code` and, where no retry mends it, `persistence`; add the line
above. On the wire an error is OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`; `from_wire` gives the
client the same class back. Some tell numbers besides, as `known`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, ClassVar


class Persistence(StrEnum):
    """Does a refusal last?"""

    TRANSIENT = "transient"
    """The same request may be answered later, or by another life of the engine."""
    PERMANENT = "permanent"
    """Neither time nor another try changes it: something has to be started differently."""


class ContractError(Exception):
    """Base of the tree. `message` says what was expected, what came, and what to do; `param` names the field.

    `known` are numbers of the engine's that the refusal is about, by name: a client can go on from them.
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
        """The JSON body for this error."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error | ({"known": self.known} if self.known else {})}


class InvalidRequest(ContractError):
    """The body is malformed or asks for what the engine cannot do."""

    status = 400
    code = "invalid_request_error"
    persistence = Persistence.PERMANENT


class ContextExceeded(InvalidRequest):
    """The prompt leaves no room for a token: a fault of this one prompt, not of the client."""

    code = "context_length_exceeded"


class NotFinite(ContractError):
    """The model's logits for this request are NaN or infinite; an engine of the same weights would say the same."""

    status = 500
    code = "not_finite"


class Unauthorized(ContractError):
    """The bearer token is missing or wrong."""

    status = 401
    code = "unauthorized"
    persistence = Persistence.PERMANENT


class UnknownModel(ContractError):
    """The request names a model this engine does not serve."""

    status = 404
    code = "model_not_found"
    persistence = Persistence.PERMANENT


class Conflict(ContractError):
    """The request is well formed but does not fit the engine's state."""

    status = 409
    code = "conflict"


class StaleGeneration(Conflict):
    """A process group older than the one already joined.

    `known` tells the `generation` joined, and the latest `epoch` that this engine has taken weights of: a trainer of
    that epoch or a later one goes on above that generation.
    """

    code = "stale_generation"


class StaleVersion(Conflict):
    """A weight version that does not come after the one served."""

    code = "stale_version"


class UpdateInProgress(Conflict):
    """Another update is being received."""

    code = "update_in_progress"


class NotPrepared(Conflict):
    """A commit, or an abort, for an update that was not prepared, or a broadcast without a process group."""

    code = "not_prepared"


class LayoutMismatch(ContractError):
    """The announced parameters differ from the model's in name, order or shape, or in a dtype that is not converted."""

    status = 422
    code = "layout_mismatch"
    persistence = Persistence.PERMANENT


class OutOfRange(ContractError):
    """A value that came, which is finite, is too large for the dtype that the engine keeps; the old weights serve."""

    status = 422
    code = "out_of_range"
    persistence = Persistence.PERMANENT


class Overloaded(ContractError):
    """The waiting queue is full; retry elsewhere or later."""

    status = 429
    code = "overloaded"


class DigestMismatch(ContractError):
    """The bytes that arrived do not have the digest that was announced; the old weights still serve."""

    status = 502
    code = "digest_mismatch"


class PeerLost(ContractError):
    """Another rank of the process group left or died; the old weights still serve, a new membership is needed."""

    status = 502
    code = "peer_lost"


class Dirty(ContractError):
    """The engine holds half-received weights and serves only after a full update."""

    status = 503
    code = "dirty"


class EngineStopped(ContractError):
    """The engine is closing."""

    status = 503
    code = "engine_stopped"


class DeadlineExceeded(ContractError):
    """Something this request waited for did not come in time; the message names it."""

    status = 504
    code = "deadline_exceeded"


def _tree(root: type[ContractError]) -> list[type[ContractError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]


def has_error_shape(body: Any) -> bool:
    """Returns whether this decoded JSON body is an engine's own error, not one of what stands in front of it."""
    return isinstance(body, dict) and isinstance(body.get("error"), dict)


def from_wire(status: int, body: Any) -> ContractError:
    """The error an engine answered with, as the class it was raised as.

    Args:
        status: HTTP status of the answer.
        body: decoded JSON body; anything that is not the error shape gives a plain `ContractError`.
    """
    if not has_error_shape(body):
        return ContractError(f"expected a contract error body, got HTTP {status} with another body")
    error = body["error"]
    classes = {cls.code: cls for cls in _tree(ContractError)}
    cls = classes.get(str(error.get("code")), ContractError)
    told = error.get("known")
    numbers = told.items() if isinstance(told, dict) else ()
    known = {str(name): number for name, number in numbers if type(number) is int}
    return cls(str(error.get("message")), param=error.get("param"), known=known)
