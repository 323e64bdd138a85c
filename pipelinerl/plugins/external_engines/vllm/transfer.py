r"""The transfer backend `pipelinerl` in vLLM's workers, by which the engine `vllm` and stock servers get weights.

    vllm serve MODEL --worker-extension-cls pipelinerl.plugins.external_engines.vllm.transfer.SharedWeights \
        --weight-transfer-config '{"backend": "pipelinerl"}'

Each worker imports this module before it loads the model. All workers map the bytes that the engine, or the adapter of
a server, has staged. Each takes its own slices, as vLLM's loaders do from disk. An update session reads complete,
checked bytes between two steps; before it, the workers may copy them to their GPU while they sample (`DeviceCopy`).

On CPU, vLLM repacks the weights of linear layers for oneDNN and drops the originals, so new weights cannot be loaded.
Its layerwise reload restores them, but silently gives tied embeddings wrong values. The layers here therefore call
`F.linear` on weights that stay in place, tied or not.
"""

from __future__ import annotations

import functools
import os
import select
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers import utils as vllm_layers

from inference_contract.weights import WeightLayout
from pipelinerl.engines.torch.weights import parameters_in
from pipelinerl.engines.weights.torch_endpoint import serve_endpoints
from pipelinerl.engines.weights.torch_shared_bytes import attach
from pipelinerl.plugins.external_engines.vllm.torch_device_copy import DeviceCopy

#: The backend's name on the command line, repeated in `limits`, whose imports are too many for a worker.
BACKEND: Final = "pipelinerl"

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


@dataclass(frozen=True, slots=True)
class Share:
    """The shared memory: path, size, the layout of its weights, and whether a copy may take memory of the GPU."""

    path: Path
    layout: WeightLayout
    num_bytes: int
    may_copy: bool


class SharedTransfer:
    """Transfer backend that reads shared memory; has the methods of `WeightTransferEngine` that vLLM calls."""

    supports_draft_weight_update = False
    defers_processing = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self.staged: Tensor | None = None
        """All of the shared memory, u8, or None before an engine has shared it."""
        self.copy: DeviceCopy | None = None
        self._model = model
        self._device = device
        self._layout: WeightLayout | None = None

    def parse_init_info(self, init_info: dict[str, Any]) -> Share:
        """Parse `init_info`: `path`, `layout` in JSON, and optional `num_bytes`, `may_copy`. Raises `ValueError`."""
        if not {"path", "layout"} <= init_info.keys() <= {"path", "layout", "num_bytes", "may_copy"}:
            raise ValueError(f"init_info must have path and layout, got {', '.join(sorted(init_info))}")
        layout = WeightLayout.model_validate_json(init_info["layout"])
        size, may_copy = init_info.get("num_bytes", layout.num_bytes), init_info.get("may_copy", True)
        return Share(Path(init_info["path"]), layout, size, may_copy)

    def init_transfer_engine(self, share: Share) -> None:
        """Map the shared memory, and release memory that was mapped before."""
        self.shutdown()
        self._layout = share.layout
        self.staged = attach(share.path, share.num_bytes)
        self.copy = DeviceCopy(self.staged[: share.layout.num_bytes], self._device, allowed=share.may_copy)

    def start_weight_update(self) -> None:
        """Do nothing: the bytes are already staged."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the staged weights. Raises `RuntimeError` if a parameter gets no values, or if no memory is mapped."""
        if self.copy is None or self._layout is None:
            raise RuntimeError("no engine has shared its memory; POST /init_weight_transfer_engine first")
        load_into(self._model, self.copy.take(), self._layout)

    def finish_weight_update(self) -> None:
        """Do nothing: `update_weights` has already made the weights current."""

    def reset_weight_update_target(self) -> None:
        """Do nothing: this backend always updates the one model that vLLM gave it."""

    def shutdown(self) -> None:
        if self.copy is not None:
            self.copy.close()
        self.copy = self.staged = self._layout = None


class SharedWeights:
    """Methods added to vLLM's worker, called by `collective_rpc`. vLLM rejects names that its worker has already."""

    rank: int
    device: torch.device
    model_runner: Any
    weight_transfer_engine: Any
    finish_weight_update: Any
    _weight_update_active: bool

    def pipelinerl_stage(self, commit: int) -> dict[str, bool]:
        """Begin the copy for commit `commit`, and end an open session; return if it is complete. Sampling continues."""
        if self._weight_update_active:
            self.finish_weight_update()
        return {"staged": self.weight_transfer_engine.copy.advance(commit)}

    def pipelinerl_attach(self, owner: int, endpoints: str) -> tuple[int, str]:
        """Attach this worker to the engine `vllm`; return (bytes of its cache, the memory that commits read).

        Args:
            owner: id of the engine's process; this process ends when the owner ends, for any reason.
            endpoints: socket path at which the first worker connects to serve the endpoint in the weight group.
        """
        threading.Thread(target=_end_with, args=(owner,), name="owner", daemon=True).start()
        if self.rank == 0:
            serve_endpoints(Path(endpoints), self.weight_transfer_engine.staged, self.device)
        caches: list[Tensor] = self.model_runner.kv_caches
        return sum(cache.nbytes for cache in caches), self.weight_transfer_engine.copy.place


WeightTransferEngineFactory.register_engine(BACKEND, SharedTransfer)


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
