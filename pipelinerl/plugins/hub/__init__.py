"""The source `hub:<id>`: data sets of the Hugging Face hub."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import SourceComponent

COMPONENT: Final = SourceComponent(
    build="pipelinerl.plugins.hub.source:open_hub",
    needs=("huggingface_hub",),
    remedy="pip install -e '.[hub]'",
    look="pipelinerl.plugins.hub.source:look_at_hub",
)
