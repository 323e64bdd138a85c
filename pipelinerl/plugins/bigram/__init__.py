"""The numpy bigram model with its engine and trainer, which tests use in place of mocks."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import EngineComponent, TrainerComponent

ENGINE: Final = EngineComponent(
    build="pipelinerl.plugins.bigram.engine:from_options", on_host=True, reports_policy=True, model_type="bigram"
)
TRAINER: Final = TrainerComponent(
    build="pipelinerl.plugins.bigram.trainer:BigramTrainer",
    check="pipelinerl.plugins.bigram.model:findings",
    on_host=True,
    model_type="bigram",
)
