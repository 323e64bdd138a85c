"""Sections of a recipe that say what a run shows of itself; `config` puts the whole together."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipelinerl.config.sections import Section


class SamplesSection(Section):
    """The samples that the run's directory keeps for readers; `pipelinerl samples` shows them."""

    log: Literal["on", "off"] = "on"
    groups_per_step: int = Field(default=2, ge=1, le=1024)
    """How many groups of a step are kept, drawn by seed; of those that were filtered, one is kept beside them."""
    max_bytes: int = Field(default=32 * 2**20, ge=2**20)
    """What all sample files of the run come to at most: half of it for training, half for evaluations."""


class FiguresSection(Section):
    """Figures of the steps that cost something."""

    exact_entropy_interval: int | None = Field(default=None, ge=0)
    """Every so many steps the entropy over the whole vocabulary is measured, on one rollout in 16; 0 for never. Left
    out, it is every 10, and never with the JAX trainer, which compiles programs of their own for it."""

    def interval(self, trainer: str) -> int:
        """The number of steps with this type of trainer."""
        if self.exact_entropy_interval is not None:
            return self.exact_entropy_interval
        return 0 if trainer == "jax" else 10
