"""`pipelinerl simulate`: predicts throughput and staleness of a recipe on given hardware, and compares settings."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import CommandComponent

COMMAND: Final = CommandComponent(
    build="pipelinerl.plugins.simulation.command_line:simulate",
    help="Predict throughput, waits, staleness, discards and cost of a recipe on given hardware, and compare knobs.",
)
