"""Values that change from step to step: learning rate (by step number), KL coefficient, reward baselines of roles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from pipelinerl.objective.kl_control import KLController, kl_coefficient, with_kl_coefficient
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.reward import Scored


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateSchedule:
    """Linear warm-up over `warmup_steps`, then constant, linear or cosine decay to `final_fraction` at `steps`."""

    warmup_steps: int
    steps: int
    shape: Literal["constant", "linear", "cosine"]
    final_fraction: float

    def factor(self, step: int) -> float:
        """Return the learning rate of optimizer step `step` (from 0) as a fraction of the peak rate."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return 1.0
        span = max(1, self.steps - self.warmup_steps)
        progress = min(1.0, (step - self.warmup_steps) / span)
        decay = 1.0 - progress if self.shape == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_fraction + (1.0 - self.final_fraction) * decay


#: A schedule whose rate is always the peak rate.
CONSTANT: Final = LearningRateSchedule(warmup_steps=0, steps=1, shape="constant", final_fraction=1.0)


#: Name of the metric that the KL controller reads.
KL_FIGURE: Final = "kl_reference"


class AdaptiveObjective:
    """The objective with its current KL coefficient β, and reward baselines by role; checkpoints save both values."""

    def __init__(
        self,
        objective: PolicyObjective,
        *,
        controller: KLController | None,
        restored: float | None = None,
        baselines: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._controller = controller
        self.current = objective
        self.baselines = baselines
        if controller is not None and restored is not None:
            self.current = with_kl_coefficient(objective, restored)

    @property
    def coefficient(self) -> float | None:
        """The current KL coefficient β; None if no `KLController` adjusts it."""
        return kl_coefficient(self.current) if self._controller else None

    def trained(self, scored: Scored) -> None:
        if self.current.adv.state:
            self.baselines = self.current.adv.baselines(scored)

    def observe(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Update β after a step; return as a metric the β that it used, {} if it has none or no KL."""
        beta = self.coefficient
        if self._controller is None or beta is None or KL_FIGURE not in figures:
            return {}
        self.current = with_kl_coefficient(self.current, self._controller.next(beta, figures[KL_FIGURE]))
        return {"kl_coefficient": beta}
