"""Prediction of device memory per process, from the recipe and the model's sizes alone."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import NeedsComponent

COMPONENT: Final = NeedsComponent(
    build="pipelinerl.plugins.memory.disk:needs", settle="pipelinerl.plugins.memory.disk:with_tokens"
)
