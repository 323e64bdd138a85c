"""The error tree of the pipeline. The contracts have error trees of their own.

To add an error, subclass the nearest parent. A message says what was expected, what was given, and what to do.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Final

#: Half of a surrogate pair: text that holds one is not valid Unicode, so no file or stream can encode it.
SURROGATE: Final = re.compile("[\ud800-\udfff]")
#: Names that other libraries give to keys of a recipe.
HABITS: Final[Mapping[str, str]] = {
    "lr": "optimizer.learning_rate",
    "max_grad_norm": "optimizer.grad_clip",
    "lr_scheduler_type": "optimizer.schedule",
    "batch_size": "training.rollouts_per_step",
    "train_batch_size": "training.rollouts_per_step",
    "per_device_train_batch_size": "training.rollouts_per_step",
    "num_generations": "sampling.group_size",
    "max_new_tokens": "sampling.max_tokens",
    "max_completion_length": "sampling.max_tokens",
    "max_model_len": "engine.context_length",
    "max_seq_len": "engine.context_length",
    "max_steps": "run.steps",
    "save_steps": "checkpoint.interval_steps",
    "eval_steps": "evaluation.interval_steps",
    "model_name_or_path": "model.path",
    "max_async_level": "staleness.k",
    "algorithm": "objective",
}


class PipelineError(Exception):
    """Base class of all errors of the pipeline."""


class UserError(PipelineError):
    """Invalid user input: shown as one sentence, without a traceback, with exit code 2."""


class RecipeError(UserError):
    """A recipe's key, type or value is invalid; the message begins with the field's path."""


class MissingFieldError(RecipeError):
    """A row of the data lacks `field`, or has null there; `present` are the fields that the row has."""

    def __init__(self, field: str, present: Iterable[str]) -> None:
        names = sorted(present)
        super().__init__(f'field "{field}" is missing or null; the row has {", ".join(names) or "no field"}')
        self.field = field
        self.present = names


def reason_of(error: BaseException) -> str:
    """Return the error's message, or the name of its class if it has none, as a timeout has."""
    return str(error) or type(error).__name__


class TokenRefused(RecipeError):
    """The controller rejected the bearer token."""


class ReferenceFailed(UserError):
    """User code that a recipe refers to cannot be loaded; callers add the recipe key to the message."""


class ColumnError(UserError):
    """An objective needs a missing input (column), such as `ref_logprobs`; the message says what computes it."""


class ModelError(UserError):
    """A model cannot be loaded, trained or served as configured: its files are unusable, or a setting is."""


class TemplateNameError(ModelError):
    """A chat template does not accept a name in `chat_template_kwargs`, or its value contains a control token."""


class UnshownFieldError(ModelError):
    """The chat template would ignore a field of the request, so the model would not see it; `place` names the field."""

    def __init__(self, message: str, place: str) -> None:
        super().__init__(message)
        self.place = place


class AddressError(UserError):
    """A port is taken, or a service cannot be reached at the given address."""


class DivergedError(UserError):
    """Several steps in a row had a non-finite loss, gradient or log-prob: change the recipe, retries do not help."""


class Rewound(PipelineError):
    """The trainer ends, to start again from an earlier checkpoint, since the run has collapsed."""


class FencedError(UserError):
    """A newer process has taken over this process's role, so this process must stop for good."""


class RunFailed(UserError):
    """The run cannot continue, and retries do not help; the message says why and what to change."""


class DeadlineError(PipelineError):
    """A wait timed out; the message says what was waited for."""


class RecordError(PipelineError):
    """A stored or streamed record is damaged or of an unknown kind."""


class LedgerError(PipelineError):
    """The controller's counts of orders (requests to sample one group) are inconsistent: more ended than it issued."""


class CheckpointError(PipelineError):
    """A checkpoint is missing, partial or damaged."""


class EngineUnreachable(PipelineError):
    """An engine did not answer, answered too late, or violated the contract."""


class UpdateError(PipelineError):
    """A weight update failed on some engines; the message names them."""


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


class NotUploaded(UpdateError):
    """No parameter server took the weights, so no engine was asked to load them; the message names the servers."""


class ServerLost(UpdateError):
    """A parameter server is unreachable or dropped the connection; it may come back."""


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return the end of an error message, "; did you mean …?", with the known names closest to `word`; else ""."""
    names = list(known)
    usual = HABITS.get(str(word), "")
    near = [name for name in (usual, usual.rpartition(".")[2]) if name in names]
    near = near[:1] or difflib.get_close_matches(str(word), names, n=2, cutoff=0.7)
    return f"; did you mean {' or '.join(near)}?" if near else ""
