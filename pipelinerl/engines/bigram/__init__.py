"""The engine of the numpy bigram model, which tests of higher layers use in place of mocks."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import EngineComponent

COMPONENT: Final = EngineComponent(
    build="pipelinerl.engines.bigram.engine:from_options", on_host=True, reports_policy=True, model_type="bigram"
)
