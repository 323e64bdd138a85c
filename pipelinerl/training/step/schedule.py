"""The learning rate as a pure function of the step, so that a resumed run continues it exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSchedule:
    """Linear warm-up over `warmup_steps`, then constant, linear or cosine decay to `final_fraction` at `steps`."""

    warmup_steps: int
    steps: int
    shape: Literal["constant", "linear", "cosine"]
    final_fraction: float

    def factor(self, step: int) -> float:
        """Return the multiplier of the peak rate for the optimizer step number `step` (from 0)."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return 1.0
        span = max(1, self.steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        decay = 1.0 - progress if self.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_fraction + (1.0 - self.final_fraction) * decay


#: Always the peak rate.
CONSTANT: Final = LearningRateSchedule(warmup_steps=0, steps=1, shape="constant", final_fraction=1.0)
