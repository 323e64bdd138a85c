"""What a run fixes for good; what may change while it is live is in `Knobs`."""

from __future__ import annotations

from dataclasses import dataclass

from pipelinerl.types import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """The controller's part of a recipe."""

    seed: int
    steps: int
    until_accuracy: float | None
    max_groups: int
    sampling: Sampling
    evaluation_problems: int
    evaluation_max_tokens: int
    evaluation_patience_s: float = 120.0
    """An evaluation that gets no answer for so long ends with those it has."""
    stall_s: float = 120.0
    """The watchdog speaks when nothing has got on for so long."""
    checkpoint_interval_steps: int
    engines_expected: int
