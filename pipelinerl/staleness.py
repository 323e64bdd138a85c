"""The two staleness bounds of RLAX §3.1, j and k, as pure arithmetic on versions.

j (`inference_reload_staleness`): an engine reloads when (the run's current version) − (its loaded version) ≥ j.

k (`trainer_acceptance_staleness`): a rollout may be trained on in the step that produces version v + 1 iff (v + 1) −
(version of its oldest token) ≤ k. `k = math.inf` accepts everything.

Modes (j, k): (1, 1) is on-policy lockstep; (1, 2) is one step off-policy; (1, large) with `on_update = "continue"` is
PipelineRL; (16, 32) is RLAX. In mode `auto` the run chooses j, and how much lag it holds within k (`LagRule`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from pipelinerl.errors import RecipeError

#: The value of k with which each step trains only on samples of the newest version.
LOCKSTEP: Final = 1


@dataclass(frozen=True, slots=True)
class StalenessBounds:
    """The pair (j, k); `k` may be `math.inf`.

    Raises:
        RecipeError: j < 1, or k < j. With k < j the run would deadlock: rollouts would be too old to be trained before
            engines reload.
    """

    j: int
    k: float

    def __post_init__(self) -> None:
        if self.j < 1:
            raise RecipeError(f"staleness.j must be at least 1, got {self.j}")
        if math.isnan(self.k) or (math.isfinite(self.k) and self.k != int(self.k)):
            raise RecipeError(f"staleness.k must be a whole number or inf, got {self.k}")
        if self.k < self.j:
            raise RecipeError(
                f"staleness.k must be at least j = {self.j}, got {self.k:g}: the trainer would refuse every rollout "
                "until a reload that never comes; raise k or lower j"
            )

    def reload_due(self, *, current: int, loaded: int) -> bool:
        """Return True if an engine with weights of version `loaded` must receive version `current`."""
        return current - loaded >= self.j

    def accepts(self, *, producing: int, oldest: int) -> bool:
        """Return True if the step that produces version `producing` may train on a token of version `oldest`."""
        return producing - oldest <= self.k

    def most_in_flight(self, *, current: int, loaded: int, per_step: int, sampled_at_once: float = math.inf) -> float:
        """Return how many rollouts may be in flight without any becoming too old before it is trained on.

        A prompt is sampled with version `loaded` or newer, so it must be trained within the next k − (current − loaded)
        steps, of `per_step` rollouts each. An answer may take twice as long as others, so rollouts are issued for only
        half of these steps, but for at least two. The trainer never needs more than the rollouts of two steps (current
        and next) in addition to the `sampled_at_once` rollouts that actors work on.
        """
        steps = self.k - (current - loaded)
        half = steps // 2 if math.isfinite(steps) else math.inf
        return min(per_step * max(min(steps, 2), half), 2 * per_step + sampled_at_once)

    def may_issue(
        self,
        *,
        current: int,
        loaded: int,
        queued: int,
        per_step: int,
        sampled_at_once: float = math.inf,
        ahead: float = math.inf,
    ) -> bool:
        """Return True if another prompt is needed, and its rollouts will probably be fresh enough when they are used.

        `queued` rollouts, counted in whole groups, will be trained before those of the new prompt. Rollouts for `ahead`
        steps (at least two) are kept in flight, so that the trainer does not wait. While a weight update is due, they
        are kept for one step fewer: prompts issued after the update are sampled with the new weights.
        """
        most = self.most_in_flight(current=current, loaded=loaded, per_step=per_step, sampled_at_once=sampled_at_once)
        due = self.reload_due(current=current, loaded=loaded)
        return queued < min(most, per_step * (ahead - due))


#: The value of j with which the run chooses j.
AUTO: Final = "auto"
MODES: Final[dict[str, StalenessBounds]] = {
    AUTO: StalenessBounds(1, 64),
    "on_policy": StalenessBounds(1, 1),
    "one_step_off": StalenessBounds(1, 2),
    "rlax": StalenessBounds(16, 32),
}
