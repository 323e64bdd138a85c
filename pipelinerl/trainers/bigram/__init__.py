"""The trainer of the numpy bigram model, with closed-form gradients."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import TrainerComponent

COMPONENT: Final = TrainerComponent(
    build="pipelinerl.trainers.bigram.trainer:BigramTrainer", on_host=True, model_type="bigram"
)
