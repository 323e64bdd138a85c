"""`Trainer`, the interface of a training backend. The training loop calls its methods in this order:

    init_worker → ( forward* → forward_at* → ( backward+ → optimizer_step )+ → gather_weights? → save_state? )* → close

(* any number of times, + at least once, ? optional.) `gather_weights` and `save_state` read the weights and state as
the last `optimizer_step` left them. They may run on another thread during the next step's forward and backward passes,
so publishing and saving do not delay training.

The loop passes all micro-batches of a step in one call. A trainer with several devices can thus compute `width`
micro-batches at once, and sum gradients over devices once, after the last one.

A trainer guarantees that:

- `backward` on the parts of a batch accumulates the gradient of the whole batch;
- only `optimizer_step` changes weights;
- training continues bit for bit after `save_state` and `init_worker(restore_from)`;
- every rank gathers the same parameters in the same order.
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
    """A training backend. Its methods raise only `trainer_contract.errors.TrainerError`."""

    @property
    def model_version(self) -> int:
        """The number of optimizer steps applied so far; the loop may apply several before it publishes a version."""
        ...

    @property
    def width(self) -> int:
        """The number of micro-batches that the trainer computes at once, on different devices.

        A call is fastest if its number of micro-batches is a multiple of `width`, and each `width` consecutive ones
        have similar cost.
        """
        ...

    def init_worker(self, spec: TrainerSpec) -> None:
        """Load and shard weights and optimizer state, from `spec.model_path` or `spec.restore_from`.

        Raises:
            SpecError: the model, device, precision or head is not available.
            StateError: `restore_from` is missing, damaged, or from another model.
        """
        ...

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Float32]:
        """Return the predictions f32 [T] of each micro-batch, without gradient; 0 at segment starts.

        With a policy head, predictions are log-probs of the tokens at their temperatures. With a value head, they are
        the values of the states before the tokens.

        Raises:
            NonFiniteError: a prediction is NaN or infinite.
        """
        ...

    def forward_at(self, micro_batches: Sequence[MicroBatch], weights: HostWeights) -> list[Float32]:
        """Run `forward` on each micro-batch with the given weights; the trainer's own weights and state do not change.

        The result is that of a trainer on the same devices that has loaded the given weights. During the call, the
        devices hold one more copy of the model. The weights come from an earlier `gather_weights`, copied to the host
        (`host_weights.copied`), and are thus rounded if engines get rounded weights.

        Raises:
            StateError: the weights do not match `weight_layout`.
        """
        ...

    def backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[LossStats]:
        """Evaluate the objective on each micro-batch (at least one), and add the gradients to the accumulated one.

        A micro-batch whose loss mask selects no token adds gradient 0.

        Raises:
            NonFiniteError: a loss is NaN or infinite; `number` is the index of its micro-batch. All gradients
                accumulated in this call and before are cleared.
        """
        ...

    def optimizer_step(self, *, learning_rate: float) -> StepStats:
        """Clip, apply and clear the accumulated gradient; increment the version. A rate of 0 changes no weight.

        Raises:
            ProtocolError: no gradient was accumulated.
            NonFiniteError: the gradient is not finite; it was cleared and the weights are unchanged.
        """
        ...

    def discard_gradient(self) -> None: ...

    def weight_layout(self) -> tuple[ParameterInfo, ...]:
        """Return name, shape and dtype of every parameter, in the order of `gather_weights`; tied ones appear once.

        Names are those of the model in memory. Buffers are not included: no trainer changes them, and every engine has
        them from its model directory. A checkpoint has all tensors of the model directory under their stored names: the
        values of parameters come from the trainer, and those of buffers from the directory.
        """
        ...

    def gather_weights(self) -> Iterator[tuple[str, Any]]:
        """Yield whole parameters one by one, layer by layer: numpy arrays, torch tensors or DLPack arrays.

        A yielded array may share memory with the trainer; it is valid until the next `optimizer_step`.
        """
        ...

    def save_state(self, path: Path) -> None:
        """Write weights, optimizer state and random state into the existing directory `path`."""
        ...

    def close(self) -> None:
        """Free devices and processes."""
        ...


def started(worker: W | None) -> W:
    """Return `worker`; raise ProtocolError if it is None, that is, before `init_worker` or after `close`."""
    if worker is None:
        raise ProtocolError("the trainer has no model: call init_worker first")
    return worker
