"""What a stock vLLM server loads of ours: the weight-transfer backend `pipelinerl`, registered when vLLM imports this.

    vllm serve MODEL --worker-extension-cls pipelinerl.engines.external.vllm.transfer.SharedWeights \\
        --weight-transfer-config '{"backend": "pipelinerl"}'

An update takes the bytes that the adapter (`vllm_dialect`) has staged, in memory that both map: whole, checked, and
while the server is paused. On CPU the layers keep their weights unpacked, see `vllm_worker`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from inference_contract.weights import WeightLayout
from pipelinerl.engines.external.vllm.worker import load_into
from pipelinerl.engines.external.worker.torch_shared_bytes import attach

#: Its name on the command line. `vllm_dialect` repeats it: neither side can import the other where it runs.
BACKEND: Final = "pipelinerl"


@dataclass(frozen=True, slots=True)
class Share:
    """The memory: its name, and the layout in JSON of what it holds."""

    path: Path
    layout: WeightLayout


@final
class SharedTransfer:
    """Satisfies vLLM's `WeightTransferEngine`, as far as a worker asks it."""

    supports_draft_weight_update = False
    defers_processing = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        self._model = model
        self._staged: Any = None
        self._layout: WeightLayout | None = None

    def parse_init_info(self, init_info: dict[str, Any]) -> Share:
        """`init_info` of `/init_weight_transfer_engine`. Raises `ValueError` unless it is an adapter's."""
        if init_info.keys() != {"path", "layout"}:
            raise ValueError(f"init_info must have path and layout, got {', '.join(sorted(init_info))}")
        return Share(Path(init_info["path"]), WeightLayout.model_validate_json(init_info["layout"]))

    def init_transfer_engine(self, share: Share) -> None:
        """Map the memory of an adapter; the one before is let go of."""
        self._layout = share.layout
        self._staged = attach(share.path, share.layout.num_bytes)

    def start_weight_update(self) -> None:
        """Nothing to prepare: the bytes are there."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load what is staged. Raises `RuntimeError` when a parameter gets no values, or nothing was ever staged."""
        if self._staged is None or self._layout is None:
            raise RuntimeError("no adapter has shared its memory; POST /init_weight_transfer_engine first")
        load_into(self._model, self._staged, self._layout)

    def finish_weight_update(self) -> None:
        """Nothing to do: they serve."""

    def reset_weight_update_target(self) -> None:
        """The model is always the same."""

    def shutdown(self) -> None:
        """Let go of the memory."""
        self._staged = self._layout = None


@final
class SharedWeights:
    """The name that the command line gives; the backend needs nothing of the worker."""


WeightTransferEngineFactory.register_engine(BACKEND, SharedTransfer)
