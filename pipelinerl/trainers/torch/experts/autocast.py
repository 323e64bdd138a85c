"""Fused experts under autocast, which does not know how they multiply."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn


def follow_autocast(model: nn.Module) -> None:
    """Have every module of fused experts make its products in autocast's dtype, as linear layers do.

    transformers keeps a layer's experts as three-dimensional parameters and multiplies them by torch's grouped product,
    which autocast does not know: a trainer in bf16 would multiply what is most of such a model in fp32.
    """
    for module in fused_experts(model):
        module.forward = _CastExperts(module, module.forward)


def fused_experts(model: nn.Module) -> list[Any]:
    """The modules of a model whose parameters are the matrices of a layer's experts, [experts, …] each."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith("Experts") and any(each.ndim == 3 for each in module.parameters(False))
    ]


@final
class _CastExperts:
    """Forward of a module of experts that sees its parameters as autocast would cast them; gradients pass through."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        self._forward = forward

    def __call__(self, hidden: Tensor, *routing: Tensor) -> Any:
        device = hidden.device.type
        if not torch.is_autocast_enabled(device):
            return self._forward(hidden, *routing)
        dtype, own = torch.get_autocast_dtype(device), self._module.__dict__
        cast = {name: each.to(dtype) for name, each in self._module.named_parameters(recurse=False)}
        own.update(cast)  # found before the parameters of the same names
        try:
            return self._forward(hidden.to(dtype), *routing)
        finally:
            for name in cast:
                del own[name]
