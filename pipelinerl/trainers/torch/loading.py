"""Construction of model and optimizer state from a trainer's spec, for single- and multi-process trainers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from pipelinerl import rng
from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import model_dtype, weights_digest
from pipelinerl.models.weight_reader import WeightReader
from pipelinerl.numerics import torch_attention, torch_batch_invariant, torch_logprobs
from pipelinerl.trainers.torch import state as torch_state
from pipelinerl.trainers.torch.lora import Adapters
from pipelinerl.trainers.torch.options import StatePlace, lora_of
from pipelinerl.trainers.torch.packed_model import PackedModel, PackedValueModel, hold, load_config, load_for_training
from pipelinerl.trainers.torch.state import VALUE
from trainer_contract.errors import SpecError
from trainer_contract.types import (
    Device,
    Head,
    HeadPrecision,
    Kernels,
    Precision,
    TrainerSpec,
    WeightDType,
)


class LoadedModel(NamedTuple):
    """A model for training, the saved state that it resumes (if any), and the dtype of weights for engines.

    Parameters stay on the meta device until `move_to` or `divided` gives them memory, so a sharded process never holds
    more than its rows and one layer. Models whose parameters cannot be read one by one are already on the CPU.
    """

    model: PackedModel | PackedValueModel
    config: PreTrainedConfig
    saved: torch_state.TorchSavedState | None
    #: Reader of parameters from the model directory; None if all parameters are already loaded.
    reader: WeightReader | None
    gather_dtype: torch.dtype
    adapters: Adapters | None
    #: Digest of the model directory whose weights are the frozen base of adapters; "" without adapters.
    base_digest: str
    #: True if the frozen base of adapters stays in the directory's bf16, because matmuls are in bf16 anyway.
    keeps_base_in_bf16: bool

    @property
    def vocab_size(self) -> int:
        return int(self.config.get_text_config().vocab_size)

    @property
    def trained(self) -> dict[str, Parameter]:
        if self.adapters is not None:
            return self.adapters.trained
        return {name: parameter for name, parameter in self.model.named_weights() if parameter.requires_grad}

    @property
    def weights(self) -> dict[str, Parameter]:
        """The parameters that engines receive, by name, in the model's order; with adapters, those of the base."""
        return dict(self.model.named_weights()) if self.adapters is None else self.adapters.base

    @property
    def products(self) -> torch.dtype:
        """The dtype of matmuls in the packing check (`probe`): bf16 if a frozen base is kept in bf16, else fp32."""
        return torch.bfloat16 if self.adapters is not None and self.keeps_base_in_bf16 else torch.float32

    def compact(self) -> None:
        """Keep the frozen base of adapters in bf16 if this changes no result; call this before parameters are read."""
        if self.adapters is not None and self.keeps_base_in_bf16:
            self.adapters.compact()

    def move_to(self, device: torch.device, *, masters: StatePlace = StatePlace.DEVICE) -> dict[str, Tensor]:
        """Load the model onto the device and check that it supports packing; return the host's fp32 masters by name.

        With `masters` HOST, the device holds bf16 parameters with fp32 gradients, and their fp32 masters are on the
        host. Raises SpecError or StateError if a file cannot be read, SpecError if the model cannot be packed.
        """
        self.compact()
        if self.adapters is not None:
            self.adapters.to(device, digest=self.base_digest, read_to=self._read_to)
            self.model.probe(device, self.products)
            return {}
        weights, apart = self.weights, rounded_in_passes(self.model.model) if masters is StatePlace.HOST else set()
        on_host = with_masters({name: each for name, each in weights.items() if each in apart}, device)
        self._read_to(device, on_host)
        self.model.to(device)
        for name in on_host:
            weights[name].grad_dtype = torch.float32
        self.model.probe(device, torch.bfloat16 if on_host else torch.float32)
        return on_host

    def use_bf16_in_passes(self) -> frozenset[str]:
        """Return the names of parameters that passes may hold in bf16, because autocast rounds them to bf16 anyway.

        The parameters themselves stay fp32; their gradients are accumulated in fp32.
        """
        if self.gather_dtype is not torch.bfloat16 or self.adapters is not None:
            return frozenset()
        rounded = rounded_in_passes(self.model.model)
        names = frozenset(name for name, parameter in self.weights.items() if parameter in rounded)
        for name in names:
            self.weights[name].grad_dtype = torch.float32
        return names

    @property
    def unread(self) -> list[str]:
        is_divided = self.saved is not None and self.saved.shards is not None
        return [name for name, parameter in self.weights.items() if is_divided or parameter.is_meta]

    def values_of(self, name: str, rows: slice) -> Tensor:
        """Read rows of a parameter from the state or the model directory. Raises SpecError or StateError."""
        if self.saved is not None and self.saved.shards is not None:
            return self.saved.shards.rows(name, VALUE, rows)
        assert self.reader is not None, "what cannot be read one by one is there"
        is_of_state = self.saved is not None and self.adapters is None
        with torch_state.damage_is_state_error(self.saved if is_of_state else None):
            try:
                return self.reader.rows(name, rows)
            except ModelError as error:
                raise SpecError(f"model_path: {error}") from error

    def _read_to(self, device: torch.device, masters: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        weights = self.weights
        for name in self.unread:
            parameter = weights[name]
            if parameter.is_meta:
                hold(parameter, torch.empty_like(parameter, device=device))
            values = self.values_of(name, slice(0, len(parameter)))
            parameter.detach().copy_(values)
            if name in masters:
                masters[name].copy_(values)


def load(spec: TrainerSpec) -> LoadedModel:
    """Load the spec's model and seed torch. Raises SpecError if it is not available, StateError for a damaged state."""
    config, lora = load_config(spec.model_path), lora_of(spec.options)
    torch.manual_seed(rng.key(spec.seed, "torch_trainer"))
    torch_attention.avoid_cudnn()
    saved = None if spec.restore_from is None else torch_state.load(spec.restore_from, expected=config, head=spec.head)
    if saved is not None:
        saved.check_kind(has_adapters=lora is not None)
    # The values of a sharded state are read later, when parameters get memory.
    is_whole = saved is not None and lora is None and saved.shards is None
    source = saved.path / torch_state.MODEL if saved is not None and is_whole else spec.model_path
    try:
        gather_dtype: torch.dtype = getattr(torch, (spec.gather_dtype or model_dtype(spec.model_path)).value)
    except ModelError as error:
        raise SpecError(f"model_path: {error}") from error
    with torch_state.damage_is_state_error(saved if is_whole else None):
        model, reader = _load(source, spec, served=gather_dtype)
        adapters = None if lora is None else Adapters(model, lora)
    if adapters is not None and adapters.reaches_output and spec.head_precision is HeadPrecision.FP32:
        raise SpecError(
            "options.lora.targets names the output layer, and model.head_precision = fp32 computes it with the weights "
            "that engines hold; leave one of the two out"
        )
    digest = "" if adapters is None else weights_digest(spec.model_path)
    if adapters is not None and saved is not None:
        saved.check_adapters(adapters.record(digest=digest))
        adapters.restore(saved.path / torch_state.ADAPTER)
    compact = spec.precision is Precision.BF16 and model_dtype(spec.model_path) is WeightDType.BFLOAT16
    return LoadedModel(model, config, saved, reader, gather_dtype, adapters, digest, compact)


def refuse_device(device: Device) -> None:
    """Raise SpecError for a device that torch does not support on this machine."""
    if device is Device.TPU:
        raise SpecError("the torch trainer runs on auto, cpu or cuda, got the device tpu; use trainer.type jax")
    if device is Device.CUDA and not torch.cuda.is_available():
        raise SpecError("device is cuda, but torch finds no CUDA device; set device to auto or cpu")


def _load(
    source: Path, spec: TrainerSpec, *, served: torch.dtype
) -> tuple[PackedModel | PackedValueModel, WeightReader | None]:
    if spec.head is Head.VALUE:
        return PackedValueModel.load(source, gradient_checkpointing=spec.gradient_checkpointing)
    model, reader = load_for_training(source, gradient_checkpointing=spec.gradient_checkpointing)
    if spec.head_precision is HeadPrecision.FP32:
        torch_logprobs.to_fp32(model, served=served, rounding=spec.rounding, kernels=spec.kernels)
    if spec.kernels is Kernels.BATCH_INVARIANT:
        torch_batch_invariant.use_in(model)
    return PackedModel(model, kernels=spec.kernels), reader


def rounded_in_passes(model: PreTrainedModel) -> set[Tensor]:
    """Return the weights that only linear layers use; for training under autocast, the device can hold these in bf16.

    Autocast rounds such a weight to bf16 in every pass, and converts the bf16 gradient of the product to fp32. A bf16
    parameter with an fp32 gradient therefore gives the same bits, and needs no second copy of the weight. Embeddings,
    vectors and an output layer in fp32 (`to_fp32`) are left out, because autocast does not round them.
    """
    linear = [
        each
        for each in model.modules()
        if isinstance(each, nn.Linear | Conv1D) and not isinstance(vars(each).get("forward"), torch_logprobs.Fp32Head)
    ]
    embedded: set[Tensor] = {each.weight for each in model.modules() if isinstance(each, nn.Embedding)}
    return {each.weight for each in linear} - embedded


def with_masters(parameters: dict[str, nn.Parameter], device: torch.device) -> dict[str, Tensor]:
    """Convert parameters to bf16 in place; return their fp32 masters (fp32 copies on the host) by name.

    Masters of parameters on the meta device are uninitialised. If `device`, where the parameters will go, is a GPU, the
    masters are in pinned memory.
    """
    masters = {}
    for name, parameter in parameters.items():
        pinned = device.type == "cuda"  # pinned, so that CUDA copies run concurrently with kernels
        masters[name] = torch.empty(parameter.shape, dtype=torch.float32, pin_memory=pinned)
        if not parameter.is_meta:
            masters[name].copy_(parameter.detach())
        parameter.data = parameter.data.bfloat16()
    return masters
