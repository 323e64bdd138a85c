"""The section of a recipe that lets a run have more engines, or fewer, by its own figures: docs/fleet.md."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from pipelinerl.choices import Elasticity
from pipelinerl.config.sections import Section


class EngineLimits(Section):
    """How many engines of one type there may be; knobs change both while the run is live."""

    min: int = Field(default=1, ge=0, le=4096)
    max: int = Field(ge=1, le=4096)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min must be at most max, got {self.min} and {self.max}")
        return self


class ElasticSection(Section):
    """When there are too few engines, and when too many; `ElasticRule` says what each number is."""

    mode: Elasticity = Elasticity.ON
    interval_s: float = Field(default=10.0, gt=0, le=3600)
    patience: int = Field(default=3, ge=1, le=1000)
    settle_s: float = Field(default=60.0, ge=0, le=86400)
    waiting: float = Field(default=0.15, gt=0, lt=1)
    content: float = Field(default=0.05, gt=0, lt=1)
    busy: float = Field(default=0.8, gt=0, le=1)
    stale: float = Field(default=0.1, ge=0, le=1)
    drain_s: float = Field(default=60.0, gt=0, le=86400)
    types: dict[str, EngineLimits] = Field(default_factory=dict)
    """Limits by type: more come of the first that has room, fewer go of the last. Without any, the run is as large as
    its recipe says."""

    @model_validator(mode="after")
    def _band(self) -> Self:
        if self.content >= self.waiting:
            raise ValueError(f"content must be below waiting, got {self.content:g} and {self.waiting:g}")
        return self
