"""Problems in files: finding the files, parsing their rows, and the source that turns rows into problems."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import SourceComponent

FILES: Final = SourceComponent(
    build="pipelinerl.data.files.source:open_files",
    look="pipelinerl.data.files.hub:look_at_files",
    paths=frozenset({"path", "validation_path", "held_out_path"}),
)
HUB: Final = SourceComponent(
    build="pipelinerl.data.files.hub:open_hub",
    needs=("huggingface_hub",),
    remedy="pip install -e '.[hub]'",
    look="pipelinerl.data.files.hub:look_at_hub",
)
