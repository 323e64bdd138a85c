"""`pipelinerl sft` and `pipelinerl warmstart`: supervised training before RL, of a recipe's model or a new tiny one."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import CommandComponent

SFT: Final = CommandComponent(
    build="pipelinerl.plugins.warmstart.command_line:sft",
    help="Fine-tune a recipe's model on right answers, with the recipe's trainer, as a starting point for RL.",
)
WARMSTART: Final = CommandComponent(
    build="pipelinerl.plugins.warmstart.command_line:warmstart",
    help="Create a small model and fit it to demonstrations until it has partial skill, as a starting point for RL.",
)
