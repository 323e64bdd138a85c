"""Control of the KL coefficient β: it rises while the policy's KL from the reference exceeds the target.

The rule is that of Ziegler et al. 2019, §2.2, which InstructGPT and ROLL (`kl_ctrl`) use:

    e = clip(KL / target − 1, −0.2, 0.2)        β ← β·(1 + K·e)

`KLController` is stateless: checkpoints store only β.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final, NamedTuple

from pipelinerl.objective.adv import GAE, RewardToGo
from pipelinerl.objective.grad2 import KLPenalty
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.tokens import Policy

_MOST: Final = 0.2


@dataclass(frozen=True, slots=True)
class KLController:
    """Rule that adjusts the coefficient so that the KL approaches its target.

    `target` is in nats per token. `gain` is K; ROLL and TRL configure it as (rollouts of a step) / horizon.
    """

    target: float
    gain: float = 0.1

    def next(self, beta: float, kl: float) -> float:
        """Return the next β after a step whose KL was `kl`, estimated as the mean of K1 over its sampled tokens."""
        error = min(max(kl / self.target - 1.0, -_MOST), _MOST)
        return beta * (1.0 + self.gain * error)


def kl_coefficient(objective: PolicyObjective) -> float | None:
    """Return β of the KL penalty to the reference or of the KL cost in the rewards; None if there is no KL term."""
    if (penalty := _penalty(objective)) is not None:
        return penalty.beta
    if isinstance(objective.adv, GAE | RewardToGo) and objective.adv.kl:
        return objective.adv.kl
    return None


def with_kl_coefficient(objective: PolicyObjective, beta: float) -> PolicyObjective:
    """Return the objective with `beta` in place of its KL coefficient. Raises ValueError if it has no KL term."""
    if (penalty := _penalty(objective)) is not None:
        return dataclasses.replace(objective, grad2=dataclasses.replace(penalty, beta=beta))
    if isinstance(objective.adv, GAE | RewardToGo) and objective.adv.kl:
        return dataclasses.replace(objective, adv=dataclasses.replace(objective.adv, kl=beta))
    raise ValueError(
        "expected an objective with a KL term to control, got one without: set grad2 to kind 'kl', or adv.kl"
    )


class KLCoefficientColumn(NamedTuple):
    """An objective with β = 1, and the real β for the column `kl_coefficients`; None if no slot reads the column."""

    objective: PolicyObjective
    coefficient: float | None


def as_column(objective: PolicyObjective) -> KLCoefficientColumn:
    """Split an objective into its β and an objective with β = 1, so that backends need not compile it for each β.

    If β scales a KL cost in the rewards (as in Ziegler et al.), the advantages already include it, and backends do not
    need β.
    """
    beta = kl_coefficient(objective)
    if beta is None:
        return KLCoefficientColumn(objective, None)
    read = _penalty(objective) is not None
    return KLCoefficientColumn(with_kl_coefficient(objective, 1.0), beta if read else None)


def _penalty(objective: PolicyObjective) -> KLPenalty | None:
    """Return `grad2` if it is a KL penalty to the reference with β > 0, otherwise None."""
    grad2 = objective.grad2
    return grad2 if isinstance(grad2, KLPenalty) and grad2.beta and grad2.to is Policy.REFERENCE else None
