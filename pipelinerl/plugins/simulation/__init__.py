"""`pipelinerl simulate` predicts throughput and staleness of a recipe; `bottleneck` says what a run waits for."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import CommandComponent

COMMAND: Final = CommandComponent(
    build="pipelinerl.plugins.simulation.planning:simulate_command",
    help="Predict throughput, waits, staleness, discards and cost of a recipe on given hardware, and compare knobs.",
)
BOTTLENECK: Final = CommandComponent(
    build="pipelinerl.plugins.simulation.bottleneck:bottleneck",
    help="Show what a run waited for, and which one change would help most.",
)
