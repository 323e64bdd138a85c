"""Options of trackers: the tables `[trackers.wandb]` and `[trackers.trackio]` of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipelinerl.section import Section


class WandbSection(Section):
    """A Weights & Biases run; its key is read from where `wandb login` stored it."""

    project: str = Field(min_length=1, max_length=128)
    """Name of the project."""
    entity: str | None = None
    """A user or team; by default the user who is logged in."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes local files that `wandb sync` can upload later."""


class TrackioSection(Section):
    """A trackio run."""

    project: str = Field(min_length=1, max_length=128)
    """Name of the project."""
    space_id: str | None = None
    """A Hugging Face space; by default the run is tracked on this machine."""
