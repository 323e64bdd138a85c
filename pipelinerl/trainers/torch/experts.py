"""Mixed precision for fused experts: torch's autocast does not cover their grouped matmuls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def follow_autocast(model: nn.Module) -> None:
    """Make every module of fused experts multiply in autocast's dtype, like linear layers.

    transformers multiplies a layer's experts, which are three-dimensional parameters, by torch's grouped matmul.
    Autocast does not cover grouped matmuls, so a bf16 trainer would compute most of such a model in fp32.
    """
    for module in fused_experts(model):
        module.forward = _CastExperts(module, module.forward)


def fused_experts(model: nn.Module) -> list[Any]:
    """Return the modules that hold all experts of a layer in parameters of shape [experts, …]."""
    return [
        module
        for module in model.modules()
        if type(module).__name__.endswith("Experts") and any(each.ndim == 3 for each in module.parameters(False))
    ]


class _CastExperts:
    """Replacement for an experts module's forward that casts its parameters to autocast's dtype, differentiably."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._module = module
        self._forward = forward

    def __call__(self, hidden: Tensor, *routing: Tensor) -> Any:
        device = hidden.device.type
        if not torch.is_autocast_enabled(device):
            return self._forward(hidden, *routing)
        dtype, own = torch.get_autocast_dtype(device), self._module.__dict__
        cast = {name: each.to(dtype) for name, each in self._module.named_parameters(recurse=False)}
        own.update(cast)  # attribute lookup finds the cast tensors before the parameters of the same names
        try:
            return self._forward(hidden.to(dtype), *routing)
        finally:
            for name in cast:
                del own[name]
