"""The errors of the pipeline, as one tree. The contracts have trees of their own.

    PipelineError
    ├── UserError            what the user gave is wrong; shown as one sentence, exit code 2
    │   ├── RecipeError      a recipe's key, type or value; the message begins with the field's path
    │   │   ├── TokenRefused the run's peer wants another bearer token
    │   │   └── MissingFieldError a row of the data lacks a field; the message lists those that it has
    │   ├── ReferenceFailed  a user's code that a recipe refers to cannot be loaded
    │   ├── ColumnError      an objective reads a column that is not there; the message says who computes it
    │   ├── ModelError       a model directory is missing or incomplete
    │   │   ├── TemplateNameError   a chat template may not be given a name, or not with this value
    │   │   └── UnshownFieldError   the chat template does not look at a field of the request
    │   ├── AddressError     a port is taken, or a service cannot be reached at the address given
    │   ├── DivergedError    steps in a row were not finite: another recipe is needed, not another try
    │   ├── RunFailed        the run cannot go on; the message says why, and what has to be started differently
    │   └── FencedError      another of its kind was started and has taken over: this process must stop, for good
    ├── DeadlineError        a wait ended without what it waited for; the message names the culprit
    ├── RecordError          a stored or streamed record is damaged or of an unknown kind
    ├── LedgerError          the account of prompt orders does not balance
    ├── CheckpointError      a checkpoint is missing, partial or damaged
    ├── EngineUnreachable    an engine gave no answer, none in time, or one that is not of the contract
    └── UpdateError          a weight update failed on some engine; the message names each
        ├── ReachedNoEngine  every engine failed; it carries the reason of each
        └── ServerLost       a parameter server cannot be reached, or broke off: it may come back

To add one: subclass the nearest parent and add the line above.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class PipelineError(Exception):
    """Base of the tree; the message says what was expected, what came, and what to do."""


class UserError(PipelineError):
    """What the user gave is wrong: shown as one sentence, without a traceback."""


class RecipeError(UserError):
    """A recipe's key, type or value is wrong."""


class MissingFieldError(RecipeError):
    """A row of the data lacks a field; `field` names it, and `present` the fields that the row has."""

    def __init__(self, field: str, present: Iterable[str]) -> None:
        names = sorted(present)
        super().__init__(f'field "{field}" is missing; the row has {", ".join(names) or "no field"}')
        self.field = field
        self.present = names


class TokenRefused(RecipeError):
    """The bearer token is not that of the run."""


class ReferenceFailed(UserError):
    """A user's code cannot be loaded; the message says why, but not where it was asked for."""


class ColumnError(UserError):
    """An objective reads a column that is not there."""


class ModelError(UserError):
    """A model directory is missing or incomplete."""


class TemplateNameError(ModelError):
    """A name among `chat_template_kwargs` is not for them, or its value spells a control token."""


class UnshownFieldError(ModelError):
    """The chat template does not look at a field of the request; `place` names the field."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


class AddressError(UserError):
    """A port is taken, or a service cannot be reached."""


class DivergedError(UserError):
    """Several steps in a row had a loss, gradient or log-probs that were not finite."""


class FencedError(UserError):
    """Another process of this kind has taken over."""


class RunFailed(UserError):
    """The run cannot go on, whatever is tried again."""


class DeadlineError(PipelineError):
    """A wait ended without what it waited for."""


class RecordError(PipelineError):
    """A record is damaged or of an unknown kind."""


class LedgerError(PipelineError):
    """The account of prompt orders does not balance."""


class CheckpointError(PipelineError):
    """A checkpoint is missing, partial or damaged."""


class EngineUnreachable(PipelineError):
    """An engine gave no answer, none in time, or one that is not of the contract."""


class UpdateError(PipelineError):
    """A weight update failed on some engine."""


class ReachedNoEngine(UpdateError):
    """No engine took an update: the reason of each in `failed`; for those in `permanent`, no retry mends it."""

    def __init__(self, message: str, *, failed: Mapping[str, str], permanent: frozenset[str]) -> None:
        super().__init__(message)
        self.failed = failed
        self.permanent = permanent


class ServerLost(UpdateError):
    """A parameter server cannot be reached, or broke off."""
