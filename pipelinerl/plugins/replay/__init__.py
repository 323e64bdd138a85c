"""Recorded training steps: `pipelinerl replay` repeats one, and `pipelinerl explain` evaluates an objective on one."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import CommandComponent

REPLAY: Final = CommandComponent(
    build="pipelinerl.plugins.replay.command_line:replay",
    help="Repeat a step from its checkpoint and recorded rollouts, without engines; exit status 1 if it differs.",
)
EXPLAIN: Final = CommandComponent(
    build="pipelinerl.plugins.replay.explain:explain",
    help="Explain an objective: its five terms (slots), formula, cost and source, and its effect on given rollouts.",
)
