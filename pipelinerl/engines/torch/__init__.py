"""The torch engine, which serves any Hugging Face causal language model directory on CPU or CUDA."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import EngineComponent

COMPONENT: Final = EngineComponent(
    build="pipelinerl.engines.torch.engine:from_options",
    needs=("torch", "transformers"),
    check="pipelinerl.engines.torch.engine:findings",
    check_options="pipelinerl.engines.torch.speculation:length_of",
    replica="pipelinerl.engines.torch.replica:EngineReplica",
    reports_routing=True,
    reports_policy=True,
    casts=True,
    use_threads="torch:set_num_threads",
)
