"""Selection of the layers that get adapters, and their parameter counts; works without a model's weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers.pytorch_utils import Conv1D

from pipelinerl.models.checkpoint import check_weights
from pipelinerl.trainers.torch.lora.lora_options import LoraOptions, share_of
from trainer_contract.errors import SpecError


def target_modules(model: Any, options: LoraOptions) -> Mapping[str, nn.Module]:
    """Return the model's linear layers that the options select, by name. Raises SpecError for an impossible target."""
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    head = model.get_output_embeddings()
    inner = {name: module for name, module in linear.items() if module is not head}
    if options.targets is None:
        return inner
    for target in options.targets:
        _refuse(model, target, linear, offered=inner)
    return {name: module for name, module in linear.items() if any(_is_named(name, each) for each in options.targets)}


def last_names(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the targets as peft's configuration lists them: the distinct last components of their names."""
    return sorted({name.rpartition(".")[2] for name in modules})


def _refuse(model: Any, target: str, linear: Mapping[str, nn.Module], *, offered: Mapping[str, nn.Module]) -> None:
    named = {name: module for name, module in model.named_modules() if _is_named(name, target)}
    linear_names = [name for name in named if name in linear]
    names = ", ".join(last_names(offered))
    if not linear_names:
        is_embedding = any(isinstance(each, nn.Embedding) for each in named.values())
        kind = "is an embedding" if is_embedding else "matches no linear layer"
        raise SpecError(f"options.lora.targets: {target!r} {kind}; linear layers of this model are {names}")
    embedding = model.get_input_embeddings()
    if any(linear[name].weight is embedding.weight for name in linear_names):
        raise SpecError(f"options.lora.targets: {target!r} is tied to the embedding; choose from {names}")


def _is_named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def described(path: Path, options: LoraOptions) -> str:
    """Describe which parameters LoRA trains in a directory's model.

    Raises SpecError, or ModelError if there is no model.
    """
    model = check_weights(path)
    modules = target_modules(model, options)
    # A is [rank, in] and B is [out, rank].
    adapters = sum(options.rank * sum(cast(nn.Linear | Conv1D, each).weight.shape) for each in modules.values())
    share = share_of(adapters, sum(parameter.numel() for parameter in model.parameters()))
    return f"LoRA of rank {options.rank} on {', '.join(last_names(modules))}: {share}"
