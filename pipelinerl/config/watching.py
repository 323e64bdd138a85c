"""Recipe sections for observing a run: samples, figures, and experiment trackers (docs/reference/trackers.md)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from pipelinerl.config.sections import Section


class SamplesSection(Section):
    """Samples kept in the run's directory for users; `pipelinerl samples` shows them."""

    log: Literal["on", "off"] = "on"
    """`off` keeps no samples."""
    groups_per_step: int = Field(default=2, ge=1, le=1024)
    """Groups of each step that are kept, drawn by seed; one filtered group is kept in addition."""
    max_bytes: int = Field(default=32 * 2**20, ge=2**20)
    """Size limit of all sample files of the run: half for training, half for evaluations."""


class FiguresSection(Section):
    """Step figures that cost extra time."""

    exact_entropy_interval: int | None = Field(default=None, ge=0)
    """Steps between measurements of the entropy over the whole vocabulary, on one rollout in 16; 0 for never.

    By default 10, and never with the JAX trainer, which would have to compile extra programs.
    """

    def interval(self, trainer: str) -> int:
        """Return the interval in steps for this type of trainer; 0 for never."""
        if self.exact_entropy_interval is not None:
            return self.exact_entropy_interval
        return 0 if trainer == "jax" else 10


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


class TrackersSection(Section):
    """Experiment trackers, fed from the run's events by a separate process, so they cannot slow or end the run."""

    tensorboard: bool = False
    """Write event files to `tensorboard/` in the run's directory."""
    wandb: WandbSection | None = None
    """Settings of Weights & Biases; leave out to disable it."""
    trackio: TrackioSection | None = None
    """Settings of trackio; leave out to disable it."""

    @property
    def chosen(self) -> tuple[str, ...]:
        """Names of the enabled trackers."""
        wanted = {"tensorboard": self.tensorboard, "wandb": self.wandb, "trackio": self.trackio}
        return tuple(name for name, section in wanted.items() if section)
