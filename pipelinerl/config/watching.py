"""Sections of a recipe that say what a run shows of itself, and which trackers (docs/trackers.md) it is told to."""

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
