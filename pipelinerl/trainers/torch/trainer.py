"""`TorchTrainer`: any Hugging Face causal language model, or its value head, behind the trainer contract.

On accelerate. Weights and optimizer state are fp32; `Precision.BF16` computes under autocast. Segments are packed
without padding and never see one another. On CPU, and on CUDA with deterministic kernels, equal calls give equal bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.optim import AdamW, Optimizer

from pipelinerl import rng
from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import model_dtype
from pipelinerl.numerics import torch_head
from pipelinerl.trainers.torch import state as torch_state
from pipelinerl.trainers.torch.packed_model import PackedModel, load_config, load_for_training
from pipelinerl.trainers.torch.segments import SegmentPlan
from pipelinerl.trainers.torch.value_model import PackedValueModel
from trainer_contract.batch import check
from trainer_contract.errors import NonFiniteError, ProtocolError, SpecError
from trainer_contract.host_weights import check_weights
from trainer_contract.trainer import started
from trainer_contract.types import (
    Device,
    Float32,
    Head,
    HeadMeasure,
    HeadPrecision,
    HostWeights,
    LossStats,
    MicroBatch,
    Objective,
    OptimizerSpec,
    ParameterInfo,
    Precision,
    StepStats,
    TrainerSpec,
    measures_of,
)


@final
@dataclass(slots=True)
class TorchWorker:
    """What `init_worker` makes; `model` and `optimizer` are as accelerate prepared them."""

    spec: TrainerSpec
    accelerator: Accelerator
    model: PackedModel | PackedValueModel
    optimizer: Optimizer
    gather_dtype: torch.dtype
    vocab_size: int
    #: The storage that is trained, which a parameter leaves while other weights are lent to it.
    own: Mapping[str, Tensor]
    random: torch_state.RandomState
    model_version: int = 0
    has_gradient: bool = False

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.accelerator.device)

    @property
    def unwrapped(self) -> PackedModel | PackedValueModel:
        """The model without what accelerate put around it."""
        return cast(PackedModel | PackedValueModel, self.accelerator.unwrap_model(self.model))

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Under Hugging Face's names, in the model's order, tied parameters once."""
        yield from self.unwrapped.named_weights()


@final
class TorchTrainer:
    """Satisfies `trainer_contract.trainer.Trainer`, where the verbs are described."""

    def __init__(self) -> None:
        self._state: TorchWorker | None = None

    @property
    def model_version(self) -> int:
        """Number of optimizer steps behind the weights."""
        return self._worker.model_version

    @property
    def _worker(self) -> TorchWorker:
        return started(self._state)

    def init_worker(self, spec: TrainerSpec) -> None:
        """Load the model from `spec.model_path`, or model, optimizer and random state from `spec.restore_from`."""
        if spec.options:
            raise SpecError(f"the torch trainer knows no options, got {', '.join(spec.options)}; remove them")
        accelerator = _accelerator(spec)
        config = load_config(spec.model_path)
        torch.manual_seed(rng.key(spec.seed, "torch_trainer"))
        saved = (
            None if spec.restore_from is None else torch_state.load(spec.restore_from, expected=config, head=spec.head)
        )
        source = spec.model_path if saved is None else saved.model_path
        gather_dtype = _gather_dtype(spec)
        with torch_state.damage_is_state_error(saved):
            model = _load(source, spec, served=gather_dtype)
        model.to(accelerator.device)
        model.probe(accelerator.device)
        model, optimizer = accelerator.prepare(model, _adamw(model, spec.optimizer))
        self._state = TorchWorker(
            spec=spec,
            accelerator=accelerator,
            model=model,
            optimizer=optimizer,
            gather_dtype=gather_dtype,
            vocab_size=config.get_text_config().vocab_size,
            own={name: parameter.detach() for name, parameter in accelerator.unwrap_model(model).named_weights()},
            random=torch_state.RandomState.now(),
        )
        if saved is not None:
            saved.restore_optimizer(optimizer, dict(self._state.named_parameters()))
            self._state.model_version, self._state.random = saved.model_version, saved.random

    @property
    def width(self) -> int:
        """One after the other."""
        return 1

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Float32]:
        """Log-probs, or values, f32 [T] of every token of each; 0 at segment starts."""
        return [self._forward(micro_batch) for micro_batch in micro_batches]

    def _forward(self, micro_batch: MicroBatch) -> Float32:
        worker = self._worker
        check(micro_batch, vocab_size=worker.vocab_size)
        inside = micro_batch.position_ids > 0
        predictions = np.zeros(micro_batch.num_tokens, dtype=np.float32)
        if inside.any():
            with torch.no_grad():
                predictions[inside] = _predictions(worker, micro_batch, inside)[0].cpu().numpy()
        if not np.isfinite(predictions).all():
            raise NonFiniteError("the model's predictions are not finite: its weights are broken, restore a checkpoint")
        return predictions

    def forward_at(self, micro_batches: Sequence[MicroBatch], weights: HostWeights) -> list[Float32]:
        """`forward` through the same modules, whose parameters hold the given weights meanwhile."""
        worker = self._worker
        check_weights(weights, self.weight_layout())
        with _lent(worker.named_parameters(), weights, dtype=worker.gather_dtype):
            return self.forward(micro_batches)

    def backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[LossStats]:
        """Evaluate each on the tokens of the loss mask, then accumulate its gradient."""
        for micro_batch in micro_batches:
            check(micro_batch, vocab_size=self._worker.vocab_size, needs=objective.needs)
        return [self._backward(number, each, objective) for number, each in enumerate(micro_batches)]

    def _backward(self, number: int, micro_batch: MicroBatch, objective: Objective) -> LossStats:
        worker = self._worker
        inside = micro_batch.loss_mask
        evaluated = np.zeros(micro_batch.num_tokens, dtype=np.float32)
        if not inside.any():
            worker.has_gradient = True
            return LossStats(0.0, evaluated)
        measures = measures_of(objective)
        predictions, *measured = _predictions(worker, micro_batch, inside, measures)
        columns = {**_columns(micro_batch, inside, worker.device), **dict(zip(measures, measured, strict=True))}
        objective_loss: Tensor = objective.evaluate(predictions, columns)
        # One transfer for the loss and its predictions.
        host = torch.cat((objective_loss.detach().reshape(1).float(), predictions.detach().float())).cpu().numpy()
        loss, evaluated[inside] = float(host[0]), host[1:]
        if not math.isfinite(loss):
            self.discard_gradient()
            raise NonFiniteError(
                f"the loss is {loss}: look for NaN or infinity in advantages, weights and the sampler's "
                "log-probs; the gradient was cleared",
                number=number,
            )
        worker.accelerator.backward(objective_loss)
        worker.has_gradient = True
        return LossStats(loss, evaluated)

    def optimizer_step(self, *, learning_rate: float) -> StepStats:
        """Clip, apply, clear; refuses a gradient that is not finite."""
        worker = self._worker
        if not worker.has_gradient:
            raise ProtocolError("optimizer_step needs a gradient: call backward first")
        parameters = [parameter for parameter in worker.model.parameters() if parameter.grad is not None]
        clip = worker.spec.optimizer.grad_clip or math.inf
        norm = float(worker.accelerator.clip_grad_norm_(parameters, clip)) if parameters else 0.0
        if not math.isfinite(norm):
            self.discard_gradient()
            raise NonFiniteError(f"the gradient's norm is {norm}: it was cleared and the weights are as before")
        for group in worker.optimizer.param_groups:
            group["lr"] = learning_rate
        worker.optimizer.step()
        self.discard_gradient()
        worker.model_version += 1
        worker.random = torch_state.RandomState.now()
        return StepStats(worker.model_version, norm, learning_rate)

    def discard_gradient(self) -> None:
        """Forget what was accumulated."""
        self._worker.optimizer.zero_grad(set_to_none=True)
        self._worker.has_gradient = False

    def weight_layout(self) -> tuple[ParameterInfo, ...]:
        """Parameters in the model's order, in the dtype of the model directory unless the spec asks for another."""
        dtype = str(self._worker.gather_dtype).removeprefix("torch.")
        return tuple(ParameterInfo(name, tuple(own.shape), dtype) for name, own in self._worker.own.items())

    def gather_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Detached tensors; of an fp32 model the trainer's own memory, not a copy."""
        for name, own in self._worker.own.items():
            yield name, own.to(self._worker.gather_dtype)

    def save_state(self, path: Path) -> None:
        """Write a Hugging Face model directory, optimizer and random state below the directory `path`."""
        worker = self._worker
        torch_state.save(
            path,
            model=worker.unwrapped,
            weights=worker.own,
            random=worker.random,
            head=worker.spec.head,
            optimizer=worker.optimizer,
            model_version=worker.model_version,
        )

    def close(self) -> None:
        """Free the model and its optimizer."""
        if self._state is not None:
            self._state.accelerator.free_memory()
            self._state = None


def _gather_dtype(spec: TrainerSpec) -> torch.dtype:
    """The spec's, or the model directory's. Raises SpecError for a directory that says neither."""
    try:
        named = spec.gather_dtype or model_dtype(spec.model_path)
    except ModelError as error:
        raise SpecError(f"model_path: {error}") from error
    return cast(torch.dtype, getattr(torch, named.value))


def _accelerator(spec: TrainerSpec) -> Accelerator:
    if spec.device is Device.TPU:
        raise SpecError("the torch trainer runs on auto, cpu or cuda, got the device tpu; use trainer.type jax")
    if spec.device is Device.CUDA and not torch.cuda.is_available():
        raise SpecError("device is cuda, but torch finds no CUDA device; set device to auto or cpu")
    # accelerate keeps one state per process, which its trainers share, and refuses a second precision.
    AcceleratorState._reset_state(reset_partial_state=not torch.distributed.is_initialized())
    precision = "bf16" if spec.precision is Precision.BF16 else "no"
    accelerator = Accelerator(cpu=spec.device is Device.CPU, mixed_precision=precision)
    if spec.memory_share is not None and accelerator.device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(spec.memory_share)
    return accelerator


def _adamw(model: torch.nn.Module, spec: OptimizerSpec) -> AdamW:
    """AdamW whose weight decay spares vectors: biases and norms."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], betas=spec.betas, eps=spec.eps, fused=True)


def _load(source: Path, spec: TrainerSpec, *, served: torch.dtype) -> PackedModel | PackedValueModel:
    """The model in a directory under the head that the spec asks for. Raises SpecError."""
    if spec.head is Head.VALUE:
        return PackedValueModel.load(source, gradient_checkpointing=spec.gradient_checkpointing)
    model = load_for_training(source, gradient_checkpointing=spec.gradient_checkpointing)
    if spec.head_precision is HeadPrecision.FP32:
        torch_head.to_fp32(model, served=served)
    return PackedModel(model)


def _predictions(
    worker: TorchWorker, batch: MicroBatch, inside: np.ndarray, measures: tuple[HeadMeasure, ...] = ()
) -> Tensor:
    """[1 + M, N]: current log-probs, or values, of the tokens where `inside` [T] is True, and the M measures there."""
    device = worker.device
    temperatures = batch.temperatures[inside]
    return cast(
        Tensor,
        worker.model(
            torch.from_numpy(np.stack((batch.token_ids, batch.position_ids)).astype(np.int64)).to(device),
            SegmentPlan.of(batch.position_ids, device),
            torch.from_numpy(np.flatnonzero(inside)).to(device),
            None if (temperatures == 1.0).all() else torch.from_numpy(temperatures).to(device),
            measures,
        ),
    )


@contextmanager
def _lent(
    parameters: Iterable[tuple[str, torch.nn.Parameter]], weights: HostWeights, *, dtype: torch.dtype
) -> Iterator[None]:
    """Give each parameter other values; afterwards, whatever happened, the storage that it held before.

    Gradients and optimizer state hang on the parameter, not on its storage, and are not seen here. Tied parameters are
    one parameter, so both ends change.

    Args:
        weights: bytes of every parameter, checked against the layout.
        dtype: theirs.
    """
    own = {name: (parameter, parameter.data) for name, parameter in parameters}
    try:
        for name, (parameter, data) in own.items():
            values = torch.from_numpy(weights[name]).view(dtype).view(data.shape)
            parameter.data = values.to(device=data.device, dtype=data.dtype)
        yield
    finally:
        for parameter, data in own.values():
            parameter.data = data


def _columns(batch: MicroBatch, inside: np.ndarray, device: torch.device) -> Mapping[str, Any]:
    """What the objective reads, of the tokens inside the mask only."""
    names = ("loss_mask", "advantages", "weights", "behavior_logprobs", "temperatures")
    optional = ("old_logprobs", "ref_logprobs", "values", "returns", "kl_coefficients")
    columns = {name: getattr(batch, name) for name in names}
    columns |= {name: column for name in optional if (column := getattr(batch, name)) is not None}
    columns["segment_ids"] = batch.segment_ids.astype(np.int64)
    tensors = {name: torch.from_numpy(column[inside]).to(device) for name, column in columns.items()}
    return tensors | {"num_segments": batch.num_segments}
