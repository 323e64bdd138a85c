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
