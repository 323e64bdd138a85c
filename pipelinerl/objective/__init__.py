"""The policy objective, Eq. 3 of the RLAX paper, as five exchangeable terms (slots) on arrays of any library.

`policy_loss` computes a loss from arrays, `rollouts_loss` from rollouts. `resolve` and `PRESETS` provide the named
algorithms. The package needs only numpy.
"""

from pipelinerl.objective.catalogue import PRESETS
from pipelinerl.objective.losses import PolicyLoss, ScoredRollout, policy_loss, rollouts_loss
from pipelinerl.objective.presets import resolve

__all__ = ["PRESETS", "PolicyLoss", "ScoredRollout", "policy_loss", "resolve", "rollouts_loss"]
