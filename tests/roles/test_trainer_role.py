"""The training loop's part of a recipe."""

from __future__ import annotations

from pipelinerl.config import load
from pipelinerl.roles.trainer_role import loop_settings


def test_the_loop_knows_the_models_vocabulary() -> None:
    assert loop_settings(load("tiny")).vocab_size == 57
