"""The run's objective, in which the KL coefficient β may change from step to step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, final

from pipelinerl.objective.kl_control import KLController, kl_coefficient, with_kl_coefficient
from pipelinerl.objective.objective import PolicyObjective

#: The figure of a step that the controller reads.
KL_FIGURE: Final = "kl_reference"


@final
class AdaptiveObjective:
    """The current objective. Without a controller it stays the recipe's. Checkpoints carry its `coefficient`."""

    def __init__(
        self, objective: PolicyObjective, *, controller: KLController | None, restored: float | None = None
    ) -> None:
        self._controller = controller
        self.current = objective
        if controller is not None and restored is not None:
            self.current = with_kl_coefficient(objective, restored)

    @property
    def coefficient(self) -> float | None:
        """The controlled β; None without a controller."""
        return kl_coefficient(self.current) if self._controller else None

    def observe(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Update β after a step with these figures; return the β of that step as a figure."""
        beta = self.coefficient
        if self._controller is None or beta is None or KL_FIGURE not in figures:
            return {}
        self.current = with_kl_coefficient(self.current, self._controller.next(beta, figures[KL_FIGURE]))
        return {"kl_coefficient": beta}
