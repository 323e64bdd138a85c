"""Section of a recipe that says which trackers a run is told to: docs/trackers.md."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipelinerl.config.sections import Section


class WandbSection(Section):
    """A run of Weights & Biases; its key is where `wandb login` has put it."""

    project: str = Field(min_length=1, max_length=128)
    entity: str | None = None
    """A user or a team; by default the one who has logged in."""
    mode: Literal["online", "offline"] = "online"


class TrackioSection(Section):
    """A run of trackio."""

    project: str = Field(min_length=1, max_length=128)
    space_id: str | None = None
    """A space of the Hugging Face hub; by default on this machine."""


class TrackersSection(Section):
    """A process of its own feeds them from the run's events: none can slow the run, or end it."""

    tensorboard: bool = False
    """Event files in the run's directory, below `tensorboard/`."""
    wandb: WandbSection | None = None
    trackio: TrackioSection | None = None

    @property
    def chosen(self) -> tuple[str, ...]:
        """Their names."""
        wanted = {"tensorboard": self.tensorboard, "wandb": self.wandb, "trackio": self.trackio}
        return tuple(name for name, section in wanted.items() if section)
