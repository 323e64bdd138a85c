r"""The weight-transfer backend `pipelinerl` that a stock vLLM server loads, registered when vLLM imports this module.

    vllm serve MODEL --worker-extension-cls pipelinerl.engines.external.vllm.transfer.SharedWeights \
        --weight-transfer-config '{"backend": "pipelinerl"}'

An update reads the bytes that the adapter (`server_api`) has staged, from memory that both processes map. The bytes are
complete and checked, and the server is paused. On CPU the layers keep their weights unpacked, see `worker`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from inference_contract.weights import WeightLayout
from pipelinerl.engines.external.vllm.worker import load_into
from pipelinerl.engines.external.worker.torch_device_copy import pin, unpin
from pipelinerl.engines.external.worker.torch_shared_bytes import attach

#: The backend's name on the command line, repeated in `server_api`: each module runs in a process that cannot import
#: the other module.
BACKEND: Final = "pipelinerl"


@dataclass(frozen=True, slots=True)
class Share:
    """The shared memory: its path, and the layout of its contents, sent as JSON."""

    path: Path
    layout: WeightLayout


@final
class SharedTransfer:
    """Transfer backend that reads shared memory; has the methods of `WeightTransferEngine` that vLLM calls."""

    supports_draft_weight_update = False
    defers_processing = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self._model = model
        self._on_gpu = device.type == "cuda"
        self._staged: Any = None
        self._layout: WeightLayout | None = None

    def parse_init_info(self, init_info: dict[str, Any]) -> Share:
        """Parse the `init_info` of `/init_weight_transfer_engine`. Raises `ValueError` for wrong keys."""
        if init_info.keys() != {"path", "layout"}:
            raise ValueError(f"init_info must have path and layout, got {', '.join(sorted(init_info))}")
        return Share(Path(init_info["path"]), WeightLayout.model_validate_json(init_info["layout"]))

    def init_transfer_engine(self, share: Share) -> None:
        """Map the adapter's memory, and release memory that was mapped before."""
        self.shutdown()
        self._layout = share.layout
        self._staged = attach(share.path, share.layout.num_bytes)
        if self._on_gpu:
            pin(self._staged)  # if CUDA does not accept it, updates are only slower

    def start_weight_update(self) -> None:
        """Do nothing: the bytes are already staged."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the staged weights. Raises `RuntimeError` if a parameter gets no values, or if no memory is mapped."""
        if self._staged is None or self._layout is None:
            raise RuntimeError("no adapter has shared its memory; POST /init_weight_transfer_engine first")
        load_into(self._model, self._staged, self._layout)

    def finish_weight_update(self) -> None:
        """Do nothing: `update_weights` has already made the weights current."""

    def reset_weight_update_target(self) -> None:
        """Do nothing: this backend always updates the one model that vLLM gave it."""

    def shutdown(self) -> None:
        """Release the memory."""
        if self._on_gpu and self._staged is not None:
            unpin(self._staged)
        self._staged = self._layout = None


@final
class SharedWeights:
    """The class that the command line names, to make vLLM import this module; it adds nothing to the worker."""


WeightTransferEngineFactory.register_engine(BACKEND, SharedTransfer)
