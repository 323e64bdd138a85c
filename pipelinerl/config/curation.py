"""The section of a recipe that says which problems are asked: what is compensated for when groups are filtered."""

from __future__ import annotations

from pydantic import Field

from pipelinerl.config.sections import Section


class CurationSection(Section):
    """What a run does about problems that teach nothing."""

    oversample: float | None = Field(default=None, ge=1, le=16)
    """Most orders that are issued for each that is expected to train, where groups are filtered; 1 issues others only
    once some were. Left out, it is 3 with `training.no_signal = "filter"` and k > j: in lockstep (k = j) more orders
    would make what a step trains on a question of which group comes first."""
