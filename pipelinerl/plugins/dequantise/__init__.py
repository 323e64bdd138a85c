"""Plain copies of model directories with quantised weights, which runs make by themselves, and `dequantise`."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import CommandComponent, CopyComponent

COMPONENT: Final = CopyComponent(
    build="pipelinerl.plugins.dequantise.torch_copies:plain_directory",
    outline="pipelinerl.plugins.dequantise.torch_copies:outlined",
)
COMMAND: Final = CommandComponent(
    build="pipelinerl.plugins.dequantise.torch_copies:write_copy",
    help="Write a copy of a quantised model in bf16, as `run` keeps one itself (in ~/.cache/pipelinerl/models).",
)
