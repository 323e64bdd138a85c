"""CUDA graphs on a CPU: a replay runs the recorded function again, and copies between host and device are immediate.

The GPU test of `tests/engines/torch/test_runner.py` runs the same scenario with real CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from pipelinerl.engines.torch import decode_graphs
from pipelinerl.engines.torch.decode_graphs import DecodeGraphs
from pipelinerl.engines.torch.decoder import LlamaForward
from pipelinerl.engines.torch.page_cache import CacheReading
from pipelinerl.engines.torch.runner import TorchRunner
from pipelinerl.engines.torch.weights import TorchWeights


class _Graph:
    def __init__(self, step: Callable[[], None], pool: object) -> None:
        self.replay = step


class _Event:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def use_eager_graphs(runner: TorchRunner, patch: pytest.MonkeyPatch) -> None:
    """Let a runner on a CPU decode with `DecodeGraphs` and the interpreted Triton kernels, as on a GPU."""
    patch.setattr(decode_graphs, "capture", _Graph)
    patch.setattr(torch.cuda, "Event", _Event)
    patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    cache: Any = runner._cache
    cache.reading = CacheReading.KERNEL
    for tensors in cache._layers.values():  # all blocks at once, and the spare block
        tensors[:] = [tensor.new_zeros((cache.spare + 1, *tensor.shape[1:])) for tensor in tensors]
    cache._present[False] = cache.spare + 1
    assert isinstance(runner._forward, LlamaForward) and isinstance(runner._weights, TorchWeights)
    runner._alike = None
    runner._graphs = DecodeGraphs(runner._forward, cache, runner._weights, rows=runner.most_fed)
