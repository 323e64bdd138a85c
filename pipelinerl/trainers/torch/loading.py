"""From a trainer's spec to its model and optimizer, the same for one process and for each of several."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple, cast, final

import torch
from torch import Tensor
from torch.optim import AdamW
from transformers import PreTrainedConfig

from pipelinerl import rng
from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import model_dtype
from pipelinerl.numerics import torch_head
from pipelinerl.trainers.torch import state as torch_state
from pipelinerl.trainers.torch.packed_model import PackedModel, load_config, load_for_training
from pipelinerl.trainers.torch.value_model import PackedValueModel
from trainer_contract.errors import SpecError
from trainer_contract.types import Device, Head, HeadPrecision, OptimizerSpec, TrainerSpec


@final
class LoadedModel(NamedTuple):
    """A model on the CPU, the state that it is from if it is from one, and the dtype that engines are sent it in."""

    model: PackedModel | PackedValueModel
    config: PreTrainedConfig
    saved: torch_state.TorchSavedState | None
    gather_dtype: torch.dtype


def load(spec: TrainerSpec) -> LoadedModel:
    """The model of `spec.model_path` or `spec.restore_from`; torch's generators begin as the spec's seed says.

    Raises:
        SpecError: it cannot be had. StateError: the saved state is damaged, or of another model.
    """
    config = load_config(spec.model_path)
    torch.manual_seed(rng.key(spec.seed, "torch_trainer"))
    saved = None if spec.restore_from is None else torch_state.load(spec.restore_from, expected=config, head=spec.head)
    source = spec.model_path if saved is None else saved.model_path
    gather_dtype = _gather_dtype(spec)
    with torch_state.damage_is_state_error(saved):
        model = _load(source, spec, served=gather_dtype)
    return LoadedModel(model, config, saved, gather_dtype)


def refuse_device(device: Device) -> None:
    """Raise SpecError for a device that torch does not have here."""
    if device is Device.TPU:
        raise SpecError("the torch trainer runs on auto, cpu or cuda, got the device tpu; use trainer.type jax")
    if device is Device.CUDA and not torch.cuda.is_available():
        raise SpecError("device is cuda, but torch finds no CUDA device; set device to auto or cpu")


def adamw(parameters: Iterable[Tensor], spec: OptimizerSpec) -> AdamW:
    """AdamW whose weight decay spares vectors: biases and norms."""
    trained = list(parameters)
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": spec.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], betas=spec.betas, eps=spec.eps, fused=True)


def _gather_dtype(spec: TrainerSpec) -> torch.dtype:
    """The spec's, or the model directory's. Raises SpecError for a directory that says neither."""
    try:
        named = spec.gather_dtype or model_dtype(spec.model_path)
    except ModelError as error:
        raise SpecError(f"model_path: {error}") from error
    return cast(torch.dtype, getattr(torch, named.value))


def _load(source: Path, spec: TrainerSpec, *, served: torch.dtype) -> PackedModel | PackedValueModel:
    """The model in a directory under the head that the spec asks for. Raises SpecError."""
    if spec.head is Head.VALUE:
        return PackedValueModel.load(source, gradient_checkpointing=spec.gradient_checkpointing)
    model = load_for_training(source, gradient_checkpointing=spec.gradient_checkpointing)
    if spec.head_precision is HeadPrecision.FP32:
        torch_head.to_fp32(model, served=served)
    return PackedModel(model)
