"""Control of the KL coefficient β: it rises while the policy's KL from the reference exceeds the target.

The rule is that of Ziegler et al. 2019, §2.2, which InstructGPT and ROLL (`kl_ctrl`) use:

    e = clip(KL / target − 1, −0.2, 0.2)        β ← β·(1 + K·e)

`KLController` is stateless: checkpoints store only β.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from pipelinerl.objective.adv import GAE, RewardToGo
from pipelinerl.objective.grad2 import KLPenalty
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.tokens import Policy

_MOST: Final = 0.2


@dataclass(frozen=True, slots=True)
class KLController:
    """Rule that moves the KL to `target`, in nats per token; ROLL and TRL set `gain` to rollouts per step / horizon."""

    target: float
    gain: float = 0.1

    def next(self, beta: float, kl: float) -> float:
        """Return the next β after a step whose KL was `kl`, estimated as the mean of K1 over its sampled tokens."""
        error = min(max(kl / self.target - 1.0, -_MOST), _MOST)
        return beta * (1.0 + self.gain * error)


def _term(objective: PolicyObjective) -> tuple[str, str] | None:
    """Return slot and field of β, of the KL penalty to the reference or of the KL cost in the rewards, or None."""
    adv, grad2 = objective.adv, objective.grad2
    if isinstance(grad2, KLPenalty) and grad2.beta and grad2.to is Policy.REFERENCE:
        return "grad2", "beta"
    return ("adv", "kl") if isinstance(adv, GAE | RewardToGo) and adv.kl else None


def kl_coefficient(objective: PolicyObjective) -> float | None:
    """Return β of the KL penalty to the reference or of the KL cost in the rewards; None if there is no KL term."""
    if (term := _term(objective)) is None:
        return None
    beta: float = getattr(getattr(objective, term[0]), term[1])
    return beta


def with_kl_coefficient(objective: PolicyObjective, beta: float) -> PolicyObjective:
    """Return the objective with `beta` in place of its KL coefficient. Raises ValueError if it has no KL term."""
    if (term := _term(objective)) is None:
        raise ValueError(
            "expected an objective with a KL term to control, got one without: set grad2 to kind 'kl', or adv.kl"
        )
    slot, field = term
    changes: dict[str, Any] = {slot: replace(getattr(objective, slot), **{field: beta})}
    return replace(objective, **changes)


def as_column(objective: PolicyObjective) -> tuple[PolicyObjective, float | None]:
    """Split an objective into one with β = 1, so that backends need not compile it for each β, and β.

    β is None if no slot reads the column `kl_coefficients`. If β scales a KL cost in the rewards (as in Ziegler et
    al.), the advantages already include it, and backends do not need it.
    """
    if (term := _term(objective)) is None:
        return objective, None
    return with_kl_coefficient(objective, 1.0), kl_coefficient(objective) if term[0] == "grad2" else None
