"""`AdaptiveObjective`: the run's objective with the one number in it that may move from step to step, the KL's β."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, final

from pipelinerl.objective.kl_control import KLController, kl_coefficient, with_kl_coefficient
from pipelinerl.objective.objective import PolicyObjective

#: The figure of a step that the controller looks at.
KL_FIGURE: Final = "kl_reference"


@final
class AdaptiveObjective:
    """Without a controller it is the recipe's objective for good. What a checkpoint carries of it is `coefficient`."""

    def __init__(
        self, objective: PolicyObjective, *, controller: KLController | None, restored: float | None = None
    ) -> None:
        self._controller = controller
        self.current = objective
        if controller is not None and restored is not None:
            self.current = with_kl_coefficient(objective, restored)

    @property
    def coefficient(self) -> float | None:
        """β as controlled; None where nothing controls it."""
        return kl_coefficient(self.current) if self._controller else None

    def observe(self, figures: Mapping[str, float]) -> dict[str, float]:
        """Move β after a step with these figures; returns the β that the step was made with, as a figure of its own."""
        beta = self.coefficient
        if self._controller is None or beta is None or KL_FIGURE not in figures:
            return {}
        self.current = with_kl_coefficient(self.current, self._controller.next(beta, figures[KL_FIGURE]))
        return {"kl_coefficient": beta}
