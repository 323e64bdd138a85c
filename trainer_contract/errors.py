"""The errors that a trainer may raise, as a tree of classes.

    TrainerError
    ├── SpecError           the spec cannot be satisfied: model, precision, device or head missing or unknown
    ├── BatchError          a micro-batch violates the layout of `types.MicroBatch`
    ├── StateError          a saved state, or given weights, are missing, damaged or from another model
    ├── ProtocolError       a method was called out of order (optimizer_step without backward)
    ├── NonFiniteError      a loss, gradient or log-prob is not finite; no update was applied
    └── RankError           a process of a multi-process trainer died, hangs or failed: restart all its processes

To add an error, subclass the nearest parent and add a line to this tree.
"""


class TrainerError(Exception):
    """Base class of trainer errors; the message states what was expected, what arrived, and the remedy."""


class SpecError(TrainerError):
    """The trainer cannot satisfy the spec."""


class BatchError(TrainerError):
    """A micro-batch is malformed."""


class StateError(TrainerError):
    """A saved state cannot be restored, or the given weights do not belong to this model."""


class ProtocolError(TrainerError):
    """A method of the trainer was called out of order."""


class NonFiniteError(TrainerError):
    """A loss, gradient or log-prob is NaN or infinite, in micro-batch `number` if known; no step was applied."""

    def __init__(self, message: str, *, number: int | None = None) -> None:
        super().__init__(message)
        self.number = number


class RankError(TrainerError):
    """A process of a multi-process trainer is lost; discard the trainer and start another one from the checkpoint."""
