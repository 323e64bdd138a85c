"""From a trainer's spec to its model and optimizer, the same for one process and for each of several."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple, cast, final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW
from transformers import PreTrainedConfig

from pipelinerl import rng
from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import model_dtype, weights_digest
from pipelinerl.numerics import torch_head
from pipelinerl.trainers.torch import state as torch_state
from pipelinerl.trainers.torch.lora.adapters import Adapters
from pipelinerl.trainers.torch.lora.lora_options import lora_of
from pipelinerl.trainers.torch.packed_model import PackedModel, load_config, load_for_training
from pipelinerl.trainers.torch.value_model import PackedValueModel
from trainer_contract.errors import SpecError
from trainer_contract.types import (
    Device,
    Head,
    HeadPrecision,
    OptimizerSpec,
    Precision,
    TrainerSpec,
    WeightDType,
)


class BaseMemory(Enum):
    """Whose the frozen weights are that adapters are trained over."""

    SHARED = auto()
    """Of all trainers of this process that are from one directory."""
    OWN = auto()
    """Of one trainer: it divides them among processes."""


@final
class LoadedModel(NamedTuple):
    """A model on the CPU, the state that it is from if it is from one, and the dtype that engines are sent it in."""

    model: PackedModel | PackedValueModel
    config: PreTrainedConfig
    saved: torch_state.TorchSavedState | None
    gather_dtype: torch.dtype
    adapters: Adapters | None
    #: Of the directory that a frozen base is from; "" without adapters.
    base_digest: str
    #: A frozen base is kept as it is in the directory, where products are of bf16 anyhow.
    keeps_base_in_bf16: bool

    @property
    def trained(self) -> dict[str, Parameter]:
        """What the optimizer holds, by name, in the model's order."""
        if self.adapters is not None:
            return self.adapters.trained
        return {name: parameter for name, parameter in self.model.named_weights() if parameter.requires_grad}

    @property
    def weights(self) -> dict[str, Parameter]:
        """What engines are sent, by name, in the model's order: of adapters and their base, the base."""
        return dict(self.model.named_weights()) if self.adapters is None else self.adapters.base

    def move_to(self, device: torch.device, *, base: BaseMemory = BaseMemory.SHARED) -> None:
        """Put the model on the device, and find out whether it can be packed. Raises SpecError."""
        is_compact = self.adapters is not None and self.keeps_base_in_bf16
        if is_compact:
            self.model.probe(torch.device("cpu"))  # in fp32, which bf16's rounding is not mistaken for a leak in
        if self.adapters is not None and is_compact:
            self.adapters.compact()
        if self.adapters is not None and base is BaseMemory.SHARED:
            self.adapters.to(device, digest=self.base_digest)
        else:
            self.model.to(device)
        if not is_compact:
            self.model.probe(device)


def load(spec: TrainerSpec) -> LoadedModel:
    """The model of `spec.model_path` or `spec.restore_from`; torch's generators begin as the spec's seed says.

    Raises:
        SpecError: it cannot be had. StateError: the saved state is damaged, or of another model.
    """
    config, lora = load_config(spec.model_path), lora_of(spec.options)
    torch.manual_seed(rng.key(spec.seed, "torch_trainer"))
    saved = None if spec.restore_from is None else torch_state.load(spec.restore_from, expected=config, head=spec.head)
    if saved is not None:
        saved.check_kind(has_adapters=lora is not None)
    # Of a state that processes have divided among them, values are read once there is somewhere to put them.
    is_whole = saved is not None and lora is None and saved.shards is None
    source = saved.model_path if saved is not None and is_whole else spec.model_path
    gather_dtype = _gather_dtype(spec)
    with torch_state.damage_is_state_error(saved if is_whole else None):
        model = _load(source, spec, served=gather_dtype)
        adapters = Adapters.of(model, lora)
    if adapters is not None and adapters.reaches_output and spec.head_precision is HeadPrecision.FP32:
        raise SpecError(
            "options.lora.targets names the output layer, and model.head_precision = fp32 computes it with the weights "
            "that engines hold; leave one of the two out"
        )
    digest = "" if adapters is None else weights_digest(spec.model_path)
    if adapters is not None and saved is not None:
        saved.check_adapters(adapters.record(digest=digest))
        adapters.restore(saved.adapter_path)
    compact = spec.precision is Precision.BF16 and model_dtype(spec.model_path) is WeightDType.BFLOAT16
    return LoadedModel(model, config, saved, gather_dtype, adapters, digest, compact)


def seed_dropout(spec: TrainerSpec, *, model_version: int, rank: int) -> None:
    """What adapters drop hangs on the step and the rank alone, so it is the same where several processes go on."""
    torch.manual_seed(rng.key(spec.seed, "adapter_dropout", model_version, rank))


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
