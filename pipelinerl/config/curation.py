"""Recipe sections for curation: which problems are issued and which groups train (docs/understand/curation.md)."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from pipelinerl.config.sections import Section


class CooldownSection(Section):
    """How long problems rest after a whole group answered them correctly; by default they do not rest."""

    epochs: int = Field(default=0, ge=0, le=1000)
    """The number of turns to skip; each problem has one turn per epoch of its data set."""
    steps: int = Field(default=0, ge=0, le=10**6)
    """The number of steps for which a solved problem is skipped, as an alternative to `epochs`."""
    times: int = Field(default=1, ge=1, le=100)
    """How many groups of a problem must have only correct answers before the problem is skipped."""

    @model_validator(mode="after")
    def _one_measure(self) -> Self:
        if self.epochs and self.steps:
            raise ValueError(f"cooldown must name epochs or steps, got {self.epochs} epochs and {self.steps} steps")
        return self


class CurationSection(Section):
    """The treatment of problems that teach nothing."""

    oversample: float | None = Field(default=None, ge=1, le=16)
    """The most orders issued per order that is expected to train, if groups are filtered.

    1 issues replacements only after groups were filtered. By default 3 if groups are filtered and k > j, otherwise 1:
    in lockstep (k = j), the groups that train would depend on which of the extra orders finish first.
    """
    cooldown: CooldownSection = CooldownSection()
    """Cooldown for domains without their own."""
    filter: str | None = None
    """User function (`path.py:keep`) that decides for each finished group whether it may train."""
    filter_timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Time limit of the filter for one group."""
