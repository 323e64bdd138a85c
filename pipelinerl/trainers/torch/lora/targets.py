"""Selection of the layers that get adapters, and their parameter counts; works without a model's weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, cast

from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from pipelinerl.models.checkpoint import check_weights
from pipelinerl.trainers.torch.lora.lora_options import LoraOptions, share_of
from trainer_contract.errors import SpecError

#: Forward methods of linear layers. A subclass with another one, such as Phi-MoE's router, does not return a product.
_PRODUCTS: Final = (nn.Linear.forward, Conv1D.forward, FalconLinear.forward)


def target_modules(model: Any, options: LoraOptions) -> Mapping[str, nn.Module]:
    """Return the linear layers that the options select in the part of the model that reads text, by name.

    Raises SpecError for an impossible target.
    """
    head = model.get_output_embeddings()
    decoder = model.get_decoder()
    # In ModernBERT's decoder, the name that transformers looks up belongs to the output layer.
    text = {head, *(model.base_model if decoder is head else decoder).modules()}
    linear = {
        name: module for name, module in model.named_modules() if module in text and type(module).forward in _PRODUCTS
    }
    inner = {name: module for name, module in linear.items() if module is not head}
    if options.targets is None:
        return inner
    for target in options.targets:
        _refuse(model, target, linear, offered=inner)
    return {name: module for name, module in linear.items() if any(_is_named(name, each) for each in options.targets)}


def last_names(names: Iterable[str]) -> list[str]:
    """Return the distinct last components of modules' names, sorted."""
    return sorted({name.rpartition(".")[2] for name in names})


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
