"""Adapters that put the contract in front of unmodified inference servers, which the user runs."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import EngineComponent

VLLM: Final = EngineComponent(
    build="pipelinerl.plugins.external_engines.server.engine:vllm_server",
    needs=("torch", "transformers"),
    on_host=True,
    drives_server=True,
)
SGLANG: Final = EngineComponent(
    build="pipelinerl.plugins.external_engines.server.engine:sglang_server",
    needs=("torch", "transformers"),
    on_host=True,
    drives_server=True,
    reports_policy=True,
)
