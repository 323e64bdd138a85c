"""The tree of errors that an engine may answer with; each class names its HTTP status and its code on the wire.

On the wire an error has OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`. `from_wire` restores the
same class on the client. `known` of some errors has numbers such as the engine's current generation.

A `permanent` error comes from how the engine or the client was started, and no retry helps. After any other error the
same request may succeed later. Clients read this from `persistence` and need not infer it from the status.

To add an error, subclass the nearest parent, which also passes on the status and the permanence.
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

    def __init_subclass__(cls, *, code: str = "", status: int = 0, permanent: bool = False) -> None:
        cls.code, cls.status = code or cls.code, status or cls.status
        if permanent:
            cls.persistence = Persistence.PERMANENT

    def __init__(
        self, message: str, *, param: str | None = None, known: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.known = dict(known)

    def to_wire(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error | ({"known": self.known} if self.known else {})}


class NotFinite(ContractError, status=500, code="not_finite"):
    """The model's logits for this request are NaN or infinite; any engine with the same weights would fail as well."""


class InvalidRequest(ContractError, status=400, code="invalid_request_error", permanent=True):
    """The body is malformed, or requests something the engine does not support; `param` names the field."""


class ContextExceeded(InvalidRequest, code="context_length_exceeded"):
    """The prompt leaves no room for a token. Only this prompt is too long: the client's other requests may succeed."""


class Unauthorized(ContractError, status=401, code="unauthorized", permanent=True):
    """The bearer token is missing or wrong."""


class UnknownModel(ContractError, status=404, code="model_not_found", permanent=True):
    """The request names a model that this engine does not serve."""


class Conflict(ContractError, status=409, code="conflict"):
    """The request is well formed but conflicts with the engine's state."""


class StaleGeneration(Conflict, code="stale_generation"):
    """The process group is older than the one already joined.

    `known` holds the joined `generation`, and the highest `epoch` (number of the trainer process) that this engine has
    accepted. A trainer of this epoch or a later one continues with a higher generation.
    """


class StaleVersion(Conflict, code="stale_version"):
    """The weight version is not newer than the one served."""


class UpdateInProgress(Conflict, code="update_in_progress"):
    """Another update is being received, or waits for its commit."""


class NotPrepared(Conflict, code="not_prepared"):
    """A commit or abort without a prepare, a broadcast without a process group, or a version that a server lacks."""


class LayoutMismatch(ContractError, status=422, code="layout_mismatch", permanent=True):
    """The announced parameters differ from the model's in name, order or shape, or have an unsupported dtype."""


class OutOfRange(ContractError, status=422, code="out_of_range", permanent=True):
    """A finite value is too large for the engine's dtype; the old weights stay in service."""


class Overloaded(ContractError, status=429, code="overloaded"):
    """The waiting queue is full; retry later or on another engine."""


class DigestMismatch(ContractError, status=502, code="digest_mismatch"):
    """The received bytes do not match the announced digest; the old weights stay in service."""


class PeerLost(ContractError, status=502, code="peer_lost"):
    """Another rank of the process group left or died; the old weights stay in service, and a new group is needed."""


class Dirty(ContractError, status=503, code="dirty"):
    """The engine may hold a mix of old and new weights, and serves again only after a full update."""


class EngineStopped(ContractError, status=503, code="engine_stopped"):
    """The engine is closing."""


class DeadlineExceeded(ContractError, status=504, code="deadline_exceeded"):
    """A peer that this request waited for did not respond in time; the message names it."""


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


def _tree(root: type[ContractError]) -> list[type[ContractError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _tree(child))]
