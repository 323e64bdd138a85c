"""`pipelinerl new`: a recipe and a reward for a user's model and data file."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import CommandComponent

COMMAND: Final = CommandComponent(
    build="pipelinerl.plugins.new_recipe.writing:new",
    help="Write a recipe and a reward function for your model and data file, ready to check and run.",
)
