"""`JaxTrainer`, the trainer contract for Llama-family decoders in JAX, on a mesh of any devices that XLA supports.

Weights and optimizer state are fp32 and sharded over the mesh; `Precision.BF16` computes in bf16. Segments are packed
into rows of a few fixed shapes. On CPU and TPU, equal calls give equal bits on the same mesh. With several processes
(`options.distributed`) this class runs on rank 0 and checks arguments for the other ranks (`JaxFollower`). Each
micro-batch is a command of its own, so that a publication can gather a parameter between two micro-batches of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from pipelinerl.errors import ModelError
from pipelinerl.models.decoder_config import DecoderConfig, read_config
from pipelinerl.numerics.dither import dithered
from pipelinerl.plugins.jax.trainer import mesh as jax_mesh
from pipelinerl.plugins.jax.trainer.mesh import join
from pipelinerl.plugins.jax.trainer.options import JaxOptions
from pipelinerl.plugins.jax.trainer.worker import JaxWorker
from pipelinerl.trainers.ranks import commands as wire
from pipelinerl.trainers.ranks.follower import Start
from pipelinerl.trainers.ranks.rank0 import TRAINER_NUMBERS, Ranks, lead
from pipelinerl.trainers.ranks.rendezvous import Distributed, Join
from trainer_contract.batch import check, check_measures
from trainer_contract.errors import ProtocolError, RankError, SpecError, StateError, TrainerError
from trainer_contract.host_weights import check_weights
from trainer_contract.trainer import started
from trainer_contract.types import (
    Float32,
    Head,
    HostWeights,
    Kernels,
    LossStats,
    MicroBatch,
    Objective,
    ParameterInfo,
    StepStats,
    TrainerSpec,
)

T = TypeVar("T")


class JaxTrainer:
    """Implementation of `trainer_contract.trainer.Trainer`, whose docstrings describe the methods."""

    def __init__(self) -> None:
        self._state: JaxWorker | None = None
        self._ranks: Ranks | None = None
        self._number = next(TRAINER_NUMBERS)

    @property
    def model_version(self) -> int:
        return self._worker.model_version

    @property
    def _worker(self) -> JaxWorker:
        return started(self._state)

    @property
    def width(self) -> int:
        """Always 1: micro-batches are computed one after the other, each sharded over the mesh by rows."""
        return 1

    def init_worker(self, spec: TrainerSpec) -> None:
        """Load weights from `spec.model_path`, or weights and moments from `spec.restore_from`, onto the mesh."""
        options, config = read_spec(spec)
        if options.distributed is None:
            self._state = JaxWorker.started(spec, options, config)
            return
        self._ranks = lead(options.distributed, join)
        start = wire.StartCommand(self._number, wire.encode_spec(spec))
        try:
            self._state = self._together(start, lambda: JaxWorker.started(spec, options, config))
        except RankError:
            raise
        except TrainerError:  # other ranks may already have started their workers; free those
            self.close()
            raise

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Float32]:
        worker = self._worker
        for micro_batch in micro_batches:
            check(micro_batch, vocab_size=worker.config.vocab)
        return [self._forward(micro_batch) for micro_batch in micro_batches]

    def _forward(self, batch: MicroBatch) -> Float32:
        worker = self._worker
        return self._together(
            lambda: wire.ForwardCommand(self._number, [wire.encode_batch(batch)], 1), lambda: worker.forward([batch])
        )[0]

    def forward_at(self, micro_batches: Sequence[MicroBatch], weights: HostWeights) -> list[Float32]:
        """Run `forward` with the given weights, which are an argument of compiled programs: nothing is recompiled."""
        worker = self._worker
        check_weights(weights, self.weight_layout())
        for micro_batch in micro_batches:
            check(micro_batch, vocab_size=worker.config.vocab)
        return self._together(
            lambda: wire.ForwardAt(
                self._number, [wire.encode_batch(batch) for batch in micro_batches], len(micro_batches)
            ),
            lambda: worker.forward_at(micro_batches, weights),
        )

    def backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[LossStats]:
        """Evaluate the objective and accumulate gradients; with several processes, each receives the objective."""
        worker = self._worker
        check_measures(objective, Head.VALUE if worker.config.scalar_head else Head.POLICY)
        for micro_batch in micro_batches:
            check(micro_batch, vocab_size=worker.config.vocab, needs=objective.needs)
        return [self._backward(number, micro_batch, objective) for number, micro_batch in enumerate(micro_batches)]

    def _backward(self, number: int, batch: MicroBatch, objective: Objective) -> LossStats:
        worker = self._worker
        return self._together(
            lambda: wire.Backward(self._number, [wire.encode_batch(batch)], 1, wire.encode_objective(objective)),
            lambda: worker.backward(number, batch, objective),
        )

    def optimizer_step(self, *, learning_rate: float) -> StepStats:
        worker = self._worker
        if worker.gradient is None:
            raise ProtocolError("optimizer_step needs a gradient: call backward first")
        return self._together(
            wire.StepCommand(self._number, learning_rate), lambda: worker.optimizer_step(learning_rate)
        )

    def discard_gradient(self) -> None:
        worker = self._worker

        def discard() -> None:
            worker.gradient = None

        self._together(wire.Discard(self._number), discard)

    def weight_layout(self) -> tuple[ParameterInfo, ...]:
        """Return parameters layer by layer, in the dtype of the model directory unless the spec overrides it."""
        return self._worker.layout()

    def gather_weights(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        worker = self._worker
        for place, info in enumerate(worker.layout()):
            array = self._together(wire.Gather(self._number, place), partial(worker.gathered, place))
            value = np.asarray(array.addressable_data(0))
            if worker.dithers:
                value = dithered(value, name=info.name).view(info.dtype)
            yield info.name, value

    def save_state(self, path: Path) -> None:
        """Write weights and moments into `path`, a directory that all processes share; each writes its own shards."""
        worker = self._worker
        self._together(wire.Save(self._number, str(path.absolute())), lambda: worker.save_parts(path))
        worker.save_record(path)

    def close(self) -> None:
        """Drop weights and programs on every rank; other ranks' processes stay up for other trainers."""
        self._state = None
        if self._ranks is not None:
            ranks, self._ranks = self._ranks, None
            ranks.drop(self._number)

    def _together(self, command: wire.Command | Callable[[], wire.Command], own: Callable[[], T]) -> T:
        """Run `own` on this rank and `command` on all other ranks at once; with one process, only run `own`."""
        if self._ranks is None:
            return own()
        message = command() if callable(command) else command
        # Commands in one lane run one at a time. `Save` only reads. Gathering weights computes on the devices, so it
        # shares a lane with the forward and backward passes.
        lane = wire.Lane.READS if isinstance(message, wire.Save) else wire.Lane.PASSES
        return self._ranks.together(lambda _: message, own, lane=lane).own


class JaxFollower:
    """A `RankWorker` that runs rank 0's commands in JAX; it returns no results, because rank 0 has them all."""

    def __init__(self, spec: TrainerSpec) -> None:
        options, config = read_spec(spec)
        self._worker = JaxWorker.started(spec, options, config)

    def execute(self, command: wire.Command) -> list[wire.RankResult]:
        """Call the worker's method for this command; rank 0 calls the same method."""
        worker = self._worker
        match command:
            case wire.ForwardCommand():
                worker.forward([wire.decode_batch(batch) for batch in command.batches])
            case wire.ForwardAt():
                worker.forward_at([wire.decode_batch(batch) for batch in command.batches], None)
            case wire.Backward():
                objective = wire.decode_objective(command.objective)
                for number, batch in enumerate(command.batches):
                    worker.backward(number, wire.decode_batch(batch), objective)
            case wire.StepCommand():
                worker.optimizer_step(command.learning_rate)
            case wire.Discard():
                worker.gradient = None
            case wire.Gather():
                worker.gathered(command.place)
            case wire.Save():
                path = Path(command.path)
                if not path.is_dir():
                    raise StateError(
                        f"{path} does not exist on this host; put the run's directory on a file system that every host "
                        "mounts at the same path"
                    )
                worker.save_parts(path)
        return []


def read_spec(spec: TrainerSpec) -> tuple[JaxOptions, DecoderConfig]:
    """Parse the spec. Raises SpecError for options, kernels, heads and models that this trainer does not support."""
    if spec.kernels is Kernels.BATCH_INVARIANT:
        raise SpecError(
            "the JAX trainer has no batch-invariant kernels; leave out model.kernels, or use trainer.type torch"
        )
    options = JaxOptions.of(spec.options, gradient_checkpointing=spec.gradient_checkpointing)
    try:
        config = read_config(spec.model_path)
        dtype = str(spec.gather_dtype or config.dtype)
        config = replace(config, dtype=dtype, scalar_head=spec.head is Head.VALUE)
    except ModelError as error:
        raise SpecError(f"model_path: {error}") from error
    jax_mesh.check_divides(options.mesh, config)
    return options, config


def as_rank(options: Mapping[str, Any]) -> tuple[Distributed | None, Join, Start]:
    """Return where rank 0 is, and how a rank above 0 joins and follows it; raise `SpecError` for invalid options."""
    return JaxOptions.of(options, gradient_checkpointing=False).distributed, join, JaxFollower
