"""Evaluation of a model outside a run, on any engine or server: `pipelinerl eval` and `pipelinerl prefilter`."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import CommandComponent

EVALUATE: Final = CommandComponent(
    build="pipelinerl.plugins.evaluation.command_line:evaluate",
    help="Evaluate a run's checkpoint, a model directory or a server at a URL: accuracy, pass@k, maj@k, lengths.",
)
PREFILTER: Final = CommandComponent(
    build="pipelinerl.plugins.evaluation.command_line:prefilter",
    help="Measure how often a model solves each training problem, and keep those within a band of pass rates.",
)
