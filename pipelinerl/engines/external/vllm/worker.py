"""Extension of vLLM's worker processes; each worker imports this module before it loads the model.

`StagedWeights` is mixed into the worker (`worker_extension_cls`) and called by `collective_rpc`, between two steps.
Every worker of a tensor-parallel engine maps the same bytes and takes its own slices, as vLLM's loaders do from disk.

On CPU, vLLM repacks the weights of linear layers for oneDNN and drops the originals, so new weights cannot be loaded.
Its layerwise reload restores them, but silently gives tied embeddings wrong values. The layers of this engine therefore
call `F.linear` on weights that stay in place, tied or not.
"""

from __future__ import annotations

import functools
import os
import select
import threading
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from vllm.model_executor.layers import utils as vllm_layers

from inference_contract.weights import WeightLayout
from pipelinerl.engines.external.worker.torch_device_copy import DeviceCopy
from pipelinerl.engines.external.worker.torch_endpoint import serve_endpoints
from pipelinerl.engines.external.worker.torch_shared_bytes import attach
from pipelinerl.engines.torch.weights import parameters_in

_pack = vllm_layers.dispatch_cpu_unquantized_gemm


@functools.wraps(_pack)
def _leave_unpacked(layer: nn.Module, remove_weight: bool) -> None:
    weight: Any = layer.weight
    if weight.ndim == 2:
        layer.__dict__["cpu_linear"] = nn.functional.linear
    else:  # convolutions and experts need vLLM's own packing
        _pack(layer, remove_weight)


# vLLM looks the function up under this name after loading each layer.
vllm_layers.dispatch_cpu_unquantized_gemm = _leave_unpacked


@final
class StagedWeights:
    """Methods added to vLLM's worker. Their names have a prefix, because vLLM rejects names that its worker has."""

    rank: int
    device: torch.device
    model_runner: Any
    _pipelinerl_copy: DeviceCopy
    _pipelinerl_layout: WeightLayout

    def pipelinerl_attach(
        self, path: str, num_bytes: int, layout: str, owner: int, endpoints: str, may_copy: bool
    ) -> tuple[int, str]:
        """Map the staging buffer; return (bytes of this worker's cache, description of the memory that commits read).

        Args:
            path: name of the buffer in shared memory, of `num_bytes` bytes.
            layout: `WeightLayout` in JSON of the weights, which lie at the buffer's beginning.
            owner: id of the engine's process; this process ends when the owner ends, for any reason.
            endpoints: socket path at which the first worker connects to serve the endpoint in the weight group.
            may_copy: whether a copy of the weights may take free memory of the GPU.
        """
        threading.Thread(target=_end_with, args=(owner,), name="owner", daemon=True).start()
        self._pipelinerl_layout = WeightLayout.model_validate_json(layout)
        staged = attach(Path(path), num_bytes)
        self._pipelinerl_copy = DeviceCopy(staged[: self._pipelinerl_layout.num_bytes], self.device, allowed=may_copy)
        if self.rank == 0:
            serve_endpoints(Path(endpoints), staged, self.device)
        caches: list[Tensor] = self.model_runner.kv_caches
        return sum(cache.nbytes for cache in caches), self._pipelinerl_copy.place

    def pipelinerl_stage(self, commit: int) -> bool:
        """Begin the copy of the staged weights to the GPU for commit number `commit`; return True once it is complete.

        Sampling continues during the copy.
        """
        return self._pipelinerl_copy.advance(commit)

    def pipelinerl_commit(self) -> None:
        """Load the staged weights into the parameters, in place. Raises `RuntimeError` if a parameter gets none."""
        load_into(self.model_runner.get_model(), self._pipelinerl_copy.take(), self._pipelinerl_layout)


def load_into(model: Any, staged: Tensor, layout: WeightLayout) -> None:
    """Load the parameters in `staged` into `model`, in place. Raises `RuntimeError` if a parameter gets no values."""
    with torch.no_grad():
        loaded = model.load_weights(parameters_in(staged, layout))
    missing = {name for name, _ in model.named_parameters()} - loaded if loaded is not None else set()
    if missing:
        raise RuntimeError(f"the update gives no values to {len(missing)} parameters, first {min(missing)}")


def _end_with(owner: int) -> None:
    """Wait for the end of the process `owner`, then exit this worker. vLLM's engine core ends with its workers."""
    try:
        ended = os.pidfd_open(owner)
    except ProcessLookupError:
        os._exit(1)
    select.select([ended], [], [])  # the descriptor is readable once the process has ended
    os._exit(1)
