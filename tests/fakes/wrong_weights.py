"""The torch engine with a fault: in one process, a few updates leave other weights than those that arrived.

`$WRONG_WEIGHTS` names the fault, and `$WRONG_UPDATES` the first and the last wrong update, counted from 1. Only the
engine named engine-1 has the fault.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor

from inference_contract.engine import Engine
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.torch import engine
from pipelinerl.engines.torch.weights import TorchWeights

FAULTS = ("frozen", "zeroed", "one", "norms", "layers", "half")

_swap = TorchWeights.swap
_updates = 0


def _wrong_swap(self: TorchWeights) -> None:
    global _updates
    _updates += 1
    first, last = map(int, os.environ["WRONG_UPDATES"].split())
    fault = os.environ["WRONG_WEIGHTS"]
    if not first <= _updates <= last:
        _swap(self)
    elif fault != "frozen":
        _swap(self)
        with torch.no_grad():
            _spoil(self._parameters, fault)


def _spoil(parameters: dict[str, torch.nn.Parameter], fault: str) -> None:
    matrices = [each for each in parameters.values() if each.ndim == 2]
    queries = [each for name, each in parameters.items() if "q_proj" in name]
    norms = [each for name, each in parameters.items() if "layernorm" in name]
    match fault:
        case "zeroed":
            matrices[len(matrices) // 2].zero_()
        case "one":
            matrices[len(matrices) // 2].view(-1)[7] *= 2
        case "norms":
            _exchange(norms[0], norms[1])
        case "layers":
            _exchange(queries[0], queries[1])
        case "half":
            for each in matrices[len(matrices) // 2 :]:
                each.mul_(0.99)


def _exchange(one: Tensor, other: Tensor) -> None:
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


def from_options(options: EngineOptions) -> Engine:
    if "engine-1" in sys.argv:
        TorchWeights.swap = _wrong_swap  # type: ignore[method-assign]
    return engine.from_options(options)
