"""The KL coefficient as a controlled quantity: it rises while the policy is farther from the reference than wanted.

Ziegler et al. 2019, §2.2 (ROLL's `kl_ctrl`, InstructGPT):

    e = clip(KL / target − 1, −0.2, 0.2)        β ← β·(1 + K·e)

`KLController` is the rule, a value; what passes from step to step, and into a checkpoint, is β alone.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final, NamedTuple, final

from pipelinerl.objective.adv import GAE, RewardToGo
from pipelinerl.objective.grad2 import KLPenalty
from pipelinerl.objective.objective import PolicyObjective

_MOST: Final = 0.2


@final
@dataclass(frozen=True, slots=True)
class KLController:
    """How the coefficient follows the KL.

    Attributes:
        target: wanted KL of the policy from the reference, in nats per token.
        gain: K per step: with the error at its bound, β changes by gain·0.2. ROLL and TRL write it as
            (rollouts of a step) / horizon.
    """

    target: float
    gain: float = 0.1

    def next(self, beta: float, kl: float) -> float:
        """The coefficient after a step whose rollouts had this KL, K1 averaged over their sampled tokens.

        K1 may be negative on a batch; the error is bounded below in any case, so β stays positive.
        """
        error = min(max(kl / self.target - 1.0, -_MOST), _MOST)
        return beta * (1.0 + self.gain * error)


def kl_coefficient(objective: PolicyObjective) -> float | None:
    """β of the objective: of its KL penalty, or of the KL cost in its rewards; None if it has neither."""
    if isinstance(objective.grad2, KLPenalty) and objective.grad2.beta:
        return objective.grad2.beta
    if isinstance(objective.adv, GAE | RewardToGo) and objective.adv.kl:
        return objective.adv.kl
    return None


def with_kl_coefficient(objective: PolicyObjective, beta: float) -> PolicyObjective:
    """The objective with another β in the place that `kl_coefficient` reads.

    Raises:
        ValueError: the objective has no KL term.
    """
    if isinstance(objective.grad2, KLPenalty) and objective.grad2.beta:
        return dataclasses.replace(objective, grad2=dataclasses.replace(objective.grad2, beta=beta))
    if isinstance(objective.adv, GAE | RewardToGo) and objective.adv.kl:
        return dataclasses.replace(objective, adv=dataclasses.replace(objective.adv, kl=beta))
    raise ValueError(
        "expected an objective with a KL term to control, got one without: set grad2 to kind 'kl', or adv.kl"
    )


class KLCoefficientColumn(NamedTuple):
    """An objective whose β is 1, and the β that the column `kl_coefficients` is to hold; None where nobody reads it."""

    objective: PolicyObjective
    coefficient: float | None


def as_column(objective: PolicyObjective) -> KLCoefficientColumn:
    """The same objective in two parts: what a backend may compile, which is one for every β, and β.

    Where β is in the rewards (Ziegler's place for it) it is used up when backends see the advantages.
    """
    beta = kl_coefficient(objective)
    if beta is None:
        return KLCoefficientColumn(objective, None)
    read = isinstance(objective.grad2, KLPenalty) and bool(objective.grad2.beta)
    return KLCoefficientColumn(with_kl_coefficient(objective, 1.0), beta if read else None)
