"""The error tree of the pipeline. The contracts have error trees of their own.

    PipelineError
    ├── UserError            invalid user input; shown as one sentence, exit code 2
    │   ├── RecipeError      a recipe's key, type or value; the message begins with the field's path
    │   │   ├── TokenRefused the run's peer requires another bearer token
    │   │   └── MissingFieldError a row of the data lacks a field; the message lists those that it has
    │   ├── ReferenceFailed  user code that a recipe refers to cannot be loaded
    │   ├── ColumnError      an objective reads a missing column; the message says what computes it
    │   ├── ModelError       a model directory is missing or incomplete
    │   │   ├── TemplateNameError   a chat template does not accept an argument of this name or value
    │   │   └── UnshownFieldError   the chat template ignores a field of the request
    │   ├── AddressError     a port is taken, or a service cannot be reached at the given address
    │   ├── DivergedError    several steps in a row were not finite: the recipe must change, retries do not help
    │   ├── RunFailed        the run cannot continue; the message says why, and what to start differently
    │   └── FencedError      another process has taken over this role: this process must stop for good
    ├── DeadlineError        a wait timed out; the message names the culprit
    ├── RecordError          a stored or streamed record is damaged or of an unknown kind
    ├── LedgerError          the account of prompt orders does not balance
    ├── CheckpointError      a checkpoint is missing, partial or damaged
    ├── EngineUnreachable    an engine did not answer, not in time, or not according to the contract
    └── UpdateError          a weight update failed on some engine; the message names each
        ├── ReachedNoEngine  every engine failed; it carries the reason of each
        └── ServerLost       a parameter server is unreachable or dropped the connection; it may come back

To add one, subclass the nearest parent and add a line above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class PipelineError(Exception):
    """Base of the tree; messages state what was expected, what was given, and what to do."""


class UserError(PipelineError):
    """Invalid user input: shown as one sentence, without a traceback."""


class RecipeError(UserError):
    """A recipe's key, type or value is invalid."""


class MissingFieldError(RecipeError):
    """A row of the data lacks `field`; `present` are the fields that the row has."""

    def __init__(self, field: str, present: Iterable[str]) -> None:
        names = sorted(present)
        super().__init__(f'field "{field}" is missing; the row has {", ".join(names) or "no field"}')
        self.field = field
        self.present = names


class TokenRefused(RecipeError):
    """The bearer token is not the run's."""


class ReferenceFailed(UserError):
    """User code cannot be loaded; the message says why, and callers add which recipe key refers to the code."""


class ColumnError(UserError):
    """An objective reads a column that is missing."""


class ModelError(UserError):
    """A model directory is missing or incomplete."""


class TemplateNameError(ModelError):
    """A name in `chat_template_kwargs` is not allowed, or its value contains a control token."""


class UnshownFieldError(ModelError):
    """The chat template ignores a field of the request; `place` names the field."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


class AddressError(UserError):
    """A port is taken, or a service cannot be reached."""


class DivergedError(UserError):
    """Several steps in a row had a loss, gradient or log-probs that were not finite."""


class FencedError(UserError):
    """Another process has taken over this role."""


class RunFailed(UserError):
    """The run cannot continue, and retries do not help."""


class DeadlineError(PipelineError):
    """A wait timed out."""


class RecordError(PipelineError):
    """A record is damaged or of an unknown kind."""


class LedgerError(PipelineError):
    """The account of prompt orders does not balance."""


class CheckpointError(PipelineError):
    """A checkpoint is missing, partial or damaged."""


class EngineUnreachable(PipelineError):
    """An engine did not answer, not in time, or not according to the contract."""


class UpdateError(PipelineError):
    """A weight update failed on some engine."""


class ReachedNoEngine(UpdateError):
    """No engine received an update.

    `failed` holds the reason for each engine. Engines in `permanent` failed for reasons that retries cannot fix;
    engines in `blameless` failed only because other engines did.
    """

    def __init__(
        self,
        message: str,
        *,
        failed: Mapping[str, str],
        permanent: frozenset[str] = frozenset(),
        blameless: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(message)
        self.failed = failed
        self.permanent = permanent
        self.blameless = blameless


class ServerLost(UpdateError):
    """A parameter server is unreachable or dropped the connection."""
