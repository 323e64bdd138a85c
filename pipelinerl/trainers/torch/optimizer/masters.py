"""Which parameters a device need hold in bf16 alone, with their fp32 masters on the host: those of linear layers.

Where products are of bf16 (autocast), a linear layer multiplies by its weight rounded to bf16, and the gradient of that
product is bf16 made fp32. A parameter that is bf16 itself, whose gradient is accumulated in fp32, gives the same bits
of both, and no rounded copy of it is made beside it. Embeddings and vectors are not rounded in a pass, so these stay
fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


def rounded_in_passes(model: PreTrainedModel) -> set[Tensor]:
    """Weights that nothing but autocast's linear layers computes with.

    An output layer whose forward is ours (`torch_head`) reads its weight in fp32, and is none of them.
    """
    linear = [each for each in model.modules() if isinstance(each, nn.Linear | Conv1D) and "forward" not in vars(each)]
    embedded: set[Tensor] = {each.weight for each in model.modules() if isinstance(each, nn.Embedding)}
    return {each.weight for each in linear} - embedded


def with_masters(parameters: dict[str, nn.Parameter], device: torch.device) -> dict[str, Tensor]:
    """Make parameters bf16, and give each fp32 memory on the host, by name: with its values, if it has any yet.

    Args:
        device: where the parameters will be.
    """
    masters = {}
    for name, parameter in parameters.items():
        pinned = device.type == "cuda"  # which CUDA copies from beside its kernels
        masters[name] = torch.empty(parameter.shape, dtype=torch.float32, pin_memory=pinned)
        if not parameter.is_meta:
            masters[name].copy_(parameter.detach())
        parameter.data = parameter.data.bfloat16()
    return masters
