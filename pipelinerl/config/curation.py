"""Sections of a recipe that say which problems are asked, and which groups train: docs/curation.md."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from pipelinerl.config.sections import Section


class CooldownSection(Section):
    """For how long a problem is not asked again once its groups were all right; by default it always is."""

    epochs: int = Field(default=0, ge=0, le=1000)
    """So many times its turn is passed over; an epoch of a data set has one turn of each problem."""
    steps: int = Field(default=0, ge=0, le=10**6)
    """For so many steps, in place of epochs."""
    times: int = Field(default=1, ge=1, le=100)
    """After so many groups that were all right."""

    @model_validator(mode="after")
    def _one_measure(self) -> Self:
        if self.epochs and self.steps:
            raise ValueError(f"cooldown must name epochs or steps, got {self.epochs} epochs and {self.steps} steps")
        return self


class CurationSection(Section):
    """What a run does about problems that teach nothing."""

    oversample: float | None = Field(default=None, ge=1, le=16)
    """Most orders that are issued for each that is expected to train, where groups are filtered; 1 issues others only
    once some were. Left out, it is 3 where groups are filtered and k > j: in lockstep (k = j) more orders would make
    what a step trains on a question of which group comes first."""
    cooldown: CooldownSection = CooldownSection()
    """Of domains that say nothing else."""
    filter: str | None = None
    """A function of the user's (`path.py:keep`) that says of each finished group whether it may train."""
    filter_timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """How long it may take for a group."""
