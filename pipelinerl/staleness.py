"""The two staleness bounds of RLAX §3.1, j and k, as pure arithmetic on versions.

j (`inference_reload_staleness`): an engine reloads when current − loaded ≥ j.
k (`trainer_acceptance_staleness`): a rollout may train the step that produces version v + 1 iff
(v + 1) − (version of its oldest token) ≤ k. `k = math.inf` accepts everything.

Presets: j = k = 1 is on-policy lockstep; (1, 2) one step off; (1, large) with `continue` is PipelineRL; (16, 32) RLAX.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from pipelinerl.errors import RecipeError


@dataclass(frozen=True, slots=True)
class StalenessBounds:
    """The pair (j, k); `k` may be `math.inf`.

    Raises:
        RecipeError: j < 1, or k < j, with which nothing would be acceptable until a reload that never comes.
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
        """Must an engine that holds `loaded` be given `current`?"""
        return current - loaded >= self.j

    def accepts(self, *, producing: int, oldest: int) -> bool:
        """May a rollout whose oldest token is of version `oldest` train the step that produces `producing`?"""
        return producing - oldest <= self.k

    def may_issue(
        self, *, current: int, loaded: int, queued: int, per_step: int, sampled_at_once: float = math.inf
    ) -> bool:
        """Return whether a prompt issued now will probably be fresh at its step, and is needed.

        Ahead of it wait `queued` rollouts, of which each step takes `per_step`, in whole groups. Its tokens will come
        from weights no older than `loaded`. It is fresh at its earliest step within k − (current − loaded) steps. An
        answer may take twice as long as others, so beyond two steps only half of them are filled. No more is needed
        than what is `sampled_at_once`, a step that trains, and one that waits.
        """
        steps = self.k - (current - loaded)
        most = per_step * max(min(steps, 2), steps // 2) if math.isfinite(steps) else math.inf
        return queued < min(most, 2 * per_step + sampled_at_once)


PRESETS: Final[dict[str, StalenessBounds]] = {
    "on_policy": StalenessBounds(1, 1),
    "one_step_off": StalenessBounds(1, 2),
    "pipeline": StalenessBounds(1, 8),
    "rlax": StalenessBounds(16, 32),
}
