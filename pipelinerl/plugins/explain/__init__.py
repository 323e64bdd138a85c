"""`pipelinerl explain`: the objective of a recipe as an expression, evaluated on recorded rollouts."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import CommandComponent

COMMAND: Final = CommandComponent(
    build="pipelinerl.plugins.explain.command_line:explain",
    help="Explain an objective: its five terms (slots), formula, cost and source, and its effect on given rollouts.",
)
