"""`Trainer`: the five verbs and the state. The training loop calls them in this order:

    init_worker → ( forward* → forward_at* → ( backward+ → optimizer_step )+ → gather_weights? → save_state? )* → close

`gather_weights` and `save_state` read what the last `optimizer_step` left. They may run on another thread while the
forward and backward passes of the next step do, so that a publication or a checkpoint costs no time of its own.

Micro-batches are given as a step has them, in one sequence, so that a trainer of several devices can compute `width` of
them at once and bring its gradients together once, at the last.

Promises: `backward` called on the parts of a batch accumulates the gradient of the whole; `optimizer_step` is the only
verb that changes weights; `save_state` then `init_worker(restore_from)` continues bit for bit; every rank gathers the
same parameters in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from trainer_contract.errors import ProtocolError
from trainer_contract.types import (
    Float32,
    HostWeights,
    LossStats,
    MicroBatch,
    Objective,
    ParameterInfo,
    StepStats,
    TrainerSpec,
)

W = TypeVar("W")


class Trainer(Protocol):
    """A training backend. Every verb raises `trainer_contract.errors.TrainerError` and nothing else."""

    @property
    def model_version(self) -> int:
        """Number of optimizer steps behind the weights.

        The loop may make several of a batch, and then publishes, counts and saves only what the last of them left.
        """
        ...

    @property
    def width(self) -> int:
        """Micro-batches computed at once: of a sequence the first `width`, then the next, on as many parts.

        A whole multiple of it, of like work within each so many, leaves no part idle; any other sequence is right, too.
        """
        ...

    def init_worker(self, spec: TrainerSpec) -> None:
        """Load and shard weights and optimizer state, from `spec.model_path` or `spec.restore_from`.

        Raises:
            SpecError: the model, device, precision or head cannot be had.
            StateError: `restore_from` is missing, damaged, or of another model.
        """
        ...

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Float32]:
        """Predictions f32 [T] of each micro-batch, without gradient; 0 at segment starts.

        Log-probs of the tokens at their temperatures, or values of the states before them, as `spec.head` says.

        Raises:
            NonFiniteError: a prediction is NaN or infinite.
        """
        ...

    def forward_at(self, micro_batches: Sequence[MicroBatch], weights: HostWeights) -> list[Float32]:
        """`forward` of each micro-batch with these weights in place of the trainer's own, whose state is untouched.

        It is the same computation, on the same devices, as of a trainer that had loaded them; while it lasts there is
        one more copy of the model there. The weights are what `gather_weights` once yielded, copied to the host
        (`host_weights.copied`): those that engines were given, where masters are rounded for them.

        Raises:
            StateError: the weights are not those of `weight_layout`.
        """
        ...

    def backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[LossStats]:
        """Evaluate the objective on each micro-batch, at least one, and accumulate the sum of their gradients.

        It is 0 where no token is in the loss mask.

        Raises:
            NonFiniteError: a loss is NaN or infinite, its `number` says of which micro-batch; what was accumulated, in
                this call and before, was cleared.
        """
        ...

    def optimizer_step(self, *, learning_rate: float) -> StepStats:
        """Clip, apply and clear the accumulated gradient; the version rises by one.

        A rate of 0 leaves every weight as it is, to the bit: a step in which the model stands still.

        Raises:
            ProtocolError: no gradient was accumulated.
            NonFiniteError: the gradient is not finite; it was cleared and the weights are as before.
        """
        ...

    def discard_gradient(self) -> None:
        """Forget what was accumulated, for a step that is skipped."""
        ...

    def weight_layout(self) -> tuple[ParameterInfo, ...]:
        """Every parameter in the order of `gather_weights`; tied parameters once."""
        ...

    def gather_weights(self) -> Iterator[tuple[str, Any]]:
        """Full parameters one by one, layer by layer: numpy arrays, torch tensors or anything with DLPack.

        A yielded array may share memory with the trainer: it is valid until the next `optimizer_step`.
        """
        ...

    def save_state(self, path: Path) -> None:
        """Write weights, optimizer and random state below the existing directory `path`."""
        ...

    def close(self) -> None:
        """Free devices and processes. The trainer is not used again."""
        ...


def started(worker: W | None) -> W:
    """Return what `init_worker` made, of a trainer that keeps None until then.

    Raises:
        ProtocolError: it was not called yet, or `close` was.
    """
    if worker is None:
        raise ProtocolError("the trainer has no model: call init_worker first")
    return worker
