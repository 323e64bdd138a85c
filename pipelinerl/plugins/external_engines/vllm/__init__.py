"""Engines over vLLM: vLLM's engine core in a child process, or a client of a stock `vllm serve`."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import EngineComponent

COMPONENT: Final = EngineComponent(
    build="pipelinerl.plugins.external_engines.vllm.engine:from_options",
    needs=("vllm", "torch", "transformers"),
    remedy="its dependencies conflict with ours; make vllm builds an environment of its own, docs/use/vllm.md",
    check_options="pipelinerl.plugins.external_engines.vllm.limits:check_names",
    casts=True,
    slow_here="pipelinerl.plugins.external_engines.vllm.engine:slow_on_cpu",
)
