"""RLAX Eq. 3 as five slots: pure functions on arrays of any library; needs only numpy.

`policy_loss` takes arrays, `rollouts_loss` takes rollouts; `resolve` and `PRESETS` give the algorithms.
"""

from pipelinerl.objective.catalogue import PRESETS
from pipelinerl.objective.explain import ScoredRollout
from pipelinerl.objective.losses import PolicyLoss, policy_loss, rollouts_loss
from pipelinerl.objective.presets import resolve

__all__ = ["PRESETS", "PolicyLoss", "ScoredRollout", "policy_loss", "resolve", "rollouts_loss"]
