"""`pipelinerl replay`: repeat a recorded training step and compare the results."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import CommandComponent

COMMAND: Final = CommandComponent(
    build="pipelinerl.plugins.replay.command_line:replay",
    help="Repeat a step from its checkpoint and recorded rollouts, without engines; exit status 1 if it differs.",
)
