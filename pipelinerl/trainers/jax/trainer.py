"""`JaxTrainer`: Llama-family decoders behind the trainer contract, in JAX, on a mesh of any devices that XLA knows.

Weights and optimizer state are fp32 and divided over the mesh; `Precision.BF16` computes in bf16. Segments are packed
into rows of a few fixed shapes and never see one another. On CPU and TPU equal calls give equal bits on the same mesh.

With several hosts (`options.distributed`) every host must make the same calls with the same micro-batches, and nothing
else may use the devices meanwhile: `gather_weights` is collective, too. This has not been run on more than one host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pipelinerl.errors import ModelError
from pipelinerl.models.decoder_config import DecoderConfig, read_config
from pipelinerl.models.jax_checkpoint import export_order, export_weights, load_weights, place_weights
from pipelinerl.trainers.jax import mesh as jax_mesh, program as jax_program, state as jax_state
from pipelinerl.trainers.jax.options import Distributed, JaxOptions
from pipelinerl.trainers.jax.program import TrainerProgram, Weights
from pipelinerl.trainers.jax.segments import PADDING, Rows
from trainer_contract.batch import check
from trainer_contract.errors import NonFiniteError, ProtocolError, SpecError
from trainer_contract.host_weights import check_weights
from trainer_contract.types import (
    Device,
    Float32,
    Head,
    HostWeights,
    LossStats,
    MicroBatch,
    Objective,
    OptimizerSpec,
    ParameterInfo,
    Precision,
    StepStats,
    TrainerSpec,
)

_PLATFORMS: Final = {Device.AUTO: None, Device.CPU: "cpu", Device.CUDA: "cuda"}


@final
@dataclass(slots=True)
class _Worker:
    """What `init_worker` makes. `moments` is optax's state; `gradient` is None when nothing was accumulated."""

    program: TrainerProgram
    optimizer: OptimizerSpec
    weights: Weights
    moments: Any
    model_version: int
    gradient: Weights | None = None

    @property
    def config(self) -> DecoderConfig:
        return self.program.config


@final
class JaxTrainer:
    """Satisfies `trainer_contract.trainer.Trainer`, where the verbs are described."""

    def __init__(self) -> None:
        self._state: _Worker | None = None

    @property
    def model_version(self) -> int:
        """Number of optimizer steps behind the weights."""
        return self._worker.model_version

    @property
    def _worker(self) -> _Worker:
        if self._state is None:
            raise ProtocolError("the trainer has no model: call init_worker first")
        return self._state

    def init_worker(self, spec: TrainerSpec) -> None:
        """Load weights from `spec.model_path`, or weights and moments from `spec.restore_from`, onto the mesh."""
        if spec.head is not Head.POLICY:
            raise SpecError(f"the JAX trainer trains policies, got the head {spec.head}; use trainer type torch")
        options = JaxOptions.of(spec.options, gradient_checkpointing=spec.gradient_checkpointing)
        try:
            config = read_config(spec.model_path)
        except ModelError as error:
            raise SpecError(f"model_path: {error}") from error
        jax_mesh.check_divides(options.mesh, config)
        program = TrainerProgram(
            config=config,
            mesh=jax_mesh.build(options.mesh, _devices(spec.device, options.distributed)),
            compute=jnp.bfloat16 if spec.precision is Precision.BF16 else jnp.float32,
            remat=options.remat,
            head=spec.head_precision,
        )
        load = _loaded if spec.restore_from is None else _restored
        self._state = load(program, spec)

    def forward(self, micro_batch: MicroBatch) -> Float32:
        """Log-probs f32 [T] of every token; 0 at segment starts."""
        return _forward(self._worker.program, self._worker.weights, micro_batch)

    def forward_at(self, micro_batches: Sequence[MicroBatch], weights: HostWeights) -> list[Float32]:
        """`forward` through the same programs: weights are an argument of theirs, so nothing is compiled anew."""
        worker = self._worker
        check_weights(weights, self.weight_layout())
        other = place_weights(worker.config, weights, like=worker.weights)
        return [_forward(worker.program, other, micro_batch) for micro_batch in micro_batches]

    def backward(self, micro_batch: MicroBatch, objective: Objective) -> LossStats:
        """Evaluate on the whole rows, in which padding counts as tokens outside the mask, and add the gradient."""
        worker = self._worker
        check(micro_batch, vocab_size=worker.config.vocab, needs=objective.needs)
        rows, columns = _laid_out(worker.program, micro_batch)
        so_far = jax_program.zeros(worker.weights) if worker.gradient is None else worker.gradient
        gradient, device_loss, logprobs = jax_program.accumulate(
            worker.program, objective, worker.weights, so_far, columns
        )
        loss = float(device_loss)
        if worker.gradient is not None:
            worker.gradient = gradient  # the buffers of the one before are gone, whatever the loss
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"the loss is {loss}: look for NaN or infinity in advantages, weights and the sampler's "
                "log-probs; nothing was accumulated from this micro-batch"
            )
        worker.gradient = gradient
        return LossStats(loss, rows.collect(np.asarray(logprobs)))

    def optimizer_step(self, *, learning_rate: float) -> StepStats:
        """Clip, apply, clear; refuses a gradient that is not finite."""
        worker = self._worker
        if worker.gradient is None:
            raise ProtocolError("optimizer_step needs a gradient: call backward first")
        gradient, worker.gradient = worker.gradient, None
        rate = np.float32(learning_rate)
        stepped = jax_program.step(worker.program, worker.optimizer, worker.weights, worker.moments, gradient, rate)
        worker.weights, worker.moments, norm = stepped.weights, stepped.moments, float(stepped.norm)
        if not math.isfinite(norm):
            raise NonFiniteError(f"the gradient's norm is {norm}: it was cleared and the weights are as before")
        worker.model_version += 1
        return StepStats(worker.model_version, norm, learning_rate)

    def discard_gradient(self) -> None:
        """Forget what was accumulated."""
        self._worker.gradient = None

    def weight_layout(self) -> tuple[ParameterInfo, ...]:
        """Parameters layer by layer, in the dtype of the model directory: what an engine loaded from it holds."""
        config = self._worker.config
        return tuple(
            ParameterInfo(parameter.name_at(layer or 0), parameter.shape, config.dtype)
            for parameter, layer in export_order(config)
        )

    def gather_weights(self) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
        """Host arrays, each gathered from the mesh when it is asked for."""
        worker = self._worker
        yield from export_weights(worker.config, worker.weights, dtype=jnp.dtype(worker.config.dtype))

    def save_state(self, path: Path) -> None:
        """Write weights and moments, in their parts, below the directory `path`. There is no random state."""
        worker = self._worker
        adam = worker.moments[0]
        arrays = dict(zip(jax_state.KINDS, (worker.weights, adam.mu, adam.nu), strict=True))
        jax_state.save(path, arrays, config=worker.config, model_version=worker.model_version)

    def close(self) -> None:
        """Drop weights and programs."""
        self._state = None


def _devices(device: Device, distributed: Distributed | None) -> list[Any]:
    """The devices to train on; joins the other hosts first."""
    if distributed is not None and not jax.distributed.is_initialized():
        try:
            jax.distributed.initialize(
                coordinator_address=distributed.coordinator,
                num_processes=distributed.processes,
                process_id=distributed.process,
            )
        except (RuntimeError, ValueError) as error:
            raise SpecError(f"options.distributed: the other hosts cannot be joined: {error}") from error
    try:
        return list(jax.devices(_PLATFORMS[device]))
    except RuntimeError as error:
        raise SpecError(f"device is {device}, but jax finds none: {error}; set device to auto or cpu") from error


def _loaded(program: TrainerProgram, spec: TrainerSpec) -> _Worker:
    try:
        weights = load_weights(spec.model_path, program.config, place=lambda p: jax_mesh.of_parameter(program.mesh, p))
    except ModelError as error:
        raise SpecError(f"model_path: {error}") from error
    return _Worker(program, spec.optimizer, weights, jax_program.new_moments(program, spec.optimizer, weights), 0)


def _restored(program: TrainerProgram, spec: TrainerSpec) -> _Worker:
    assert spec.restore_from is not None
    saved = jax_state.load(spec.restore_from, expected=program.config)
    parts = {
        p.name: jax.ShapeDtypeStruct(p.stacked_shape, jnp.float32, sharding=jax_mesh.of_parameter(program.mesh, p))
        for p in program.config.parameters
    }
    arrays = saved.restore(parts)
    weights, mean, square = (arrays[kind] for kind in jax_state.KINDS)
    adam, *others = jax.eval_shape(jax_program.adamw(program.config, spec.optimizer).init, weights)
    count = jnp.asarray(saved.model_version, adam.count.dtype)
    moments = (optax.ScaleByAdamState(count=count, mu=mean, nu=square), *others)
    return _Worker(program, spec.optimizer, weights, moments, saved.model_version)


def _forward(program: TrainerProgram, weights: Weights, batch: MicroBatch) -> Float32:
    check(batch, vocab_size=program.config.vocab)
    rows, columns = _laid_out(program, batch)
    logprobs = rows.collect(np.asarray(jax_program.logprobs(program, weights, columns)))
    if not np.isfinite(logprobs).all():
        raise NonFiniteError("the model's log-probs are not finite: its weights are broken, restore a checkpoint")
    return logprobs


def _laid_out(program: TrainerProgram, batch: MicroBatch) -> tuple[Rows, dict[str, jax.Array]]:
    """The micro-batch as rows on the mesh."""
    mesh = program.mesh
    rows = Rows.of(batch.position_ids, multiple=mesh.shape["data"] * mesh.shape["fsdp"])
    fills = {"segment_ids": PADDING, "temperatures": 1.0}
    columns = {field.name: getattr(batch, field.name) for field in fields(batch)}
    given = {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}
    spread = {name: rows.spread(column, fill=fills.get(name, 0)) for name, column in given.items()}
    return rows, jax.device_put(spread, jax_mesh.of_rows(mesh))
