"""The output layer in fp32, identical in engine and trainer, since its rounding affects log-probs the most.

The MiniMax-M1 report found the output layer's precision to be the main source of the mismatch between its training and
its inference. Hidden states and weights keep their dtypes. Their products are summed in fp32 and never rounded to a
shorter type, so engine and trainer compute the log-softmax from equally precise logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.functional import linear

from pipelinerl.numerics.dither_torch import rounded
from trainer_contract.types import Rounding


def to_fp32(model: Any, *, served: torch.dtype, rounding: Rounding = Rounding.NEAREST) -> None:
    """Make the output layer of a Hugging Face `model` return fp32 logits, whatever its input dtype.

    Args:
        served: dtype of the weights that engines hold. A trainer's fp32 weights are rounded to it here; the gradient
            ignores the rounding (straight-through).
        rounding: the same rounding as for weights sent to engines.
    """
    head = model.get_output_embeddings()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    head.forward = Fp32Head(head, served, rounding, names)


@final
class Fp32Head:
    """Replaces the forward method of an output layer. It reads the parameters at each call, so they may be replaced."""

    def __init__(self, layer: Any, served: torch.dtype, rounding: Rounding, names: Mapping[int, str]) -> None:
        self._layer = layer
        self._served = served
        self._rounding = rounding
        self._weight_name = names[id(layer.weight)]
        self._bias_name = "" if layer.bias is None else names[id(layer.bias)]

    def __call__(self, hidden: Tensor) -> Tensor:
        """Map hidden states […, d] to logits, f32 […, V]."""
        weight, bias = self._layer.weight, self._layer.bias
        with torch.autocast(hidden.device.type, enabled=False):
            its_bias = None if bias is None else self._exact(bias, self._bias_name)
            return linear(hidden.float(), self._exact(weight, self._weight_name), its_bias)

    def _exact(self, parameter: Tensor, name: str) -> Tensor:
        """Return the parameter in fp32, after rounding it to the dtype that engines hold."""
        if parameter.dtype is torch.float32 and self._served is not torch.float32:
            sent = rounded(parameter.detach(), self._served, self._rounding, name=name)
            return parameter + (sent.float() - parameter.detach())  # exact: both are within a factor of two
        return parameter.float()
