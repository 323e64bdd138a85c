"""Problems in files: finding the files, parsing their rows, and the source that turns rows into problems."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import SourceComponent

FILES: Final = SourceComponent(
    build="pipelinerl.data.files.source:open_files",
    look="pipelinerl.data.files.source:look_at_files",
    paths=frozenset({"path", "validation_path", "held_out_path"}),
)
