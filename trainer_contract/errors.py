"""The errors a trainer may raise, as one tree.

    TrainerError
    ├── SpecError           the spec cannot be satisfied: model, precision, device or head missing or unknown
    ├── BatchError          a micro-batch breaks the layout that `types.MicroBatch` promises
    ├── StateError          a saved state, or weights that were given, are missing, damaged or of another model
    ├── ProtocolError       verbs called in an order that has no meaning (optimizer_step without backward)
    ├── NonFiniteError      loss, gradient or log-probs are not finite; nothing was applied
    └── RankError           a process that holds a part of the trainer died, hangs or failed: start all of them again

To add one: subclass the nearest parent and add the line above.
"""


class TrainerError(Exception):
    """Base of the tree; the message says what was expected, what came, and what to do."""


class SpecError(TrainerError):
    """The spec cannot be satisfied."""


class BatchError(TrainerError):
    """A micro-batch is malformed."""


class StateError(TrainerError):
    """A saved state cannot be restored, or weights that were given are not this model's."""


class ProtocolError(TrainerError):
    """A verb was called out of order."""


class NonFiniteError(TrainerError):
    """A loss, gradient or log-prob is not finite; the step was not applied.

    Attributes:
        number: of the micro-batch whose loss it is, within its sequence; None where it is of none.
    """

    def __init__(self, message: str, *, number: int | None = None) -> None:
        super().__init__(message)
        self.number = number


class RankError(TrainerError):
    """A process of a trainer of several is lost; the trainer is not used again, and goes on from its checkpoint."""
