"""RLAX Eq. 3 as five slots: pure functions on arrays of any library.

The door for who wants the losses alone: `policy_loss` from arrays, `rollouts_loss` from rollouts, `resolve` and
`PRESETS` for the algorithms. numpy is all that it imports.
"""

from pipelinerl.objective.catalogue import PRESETS
from pipelinerl.objective.explain import ScoredRollout
from pipelinerl.objective.losses import PolicyLoss, policy_loss, rollouts_loss
from pipelinerl.objective.presets import resolve

__all__ = ["PRESETS", "PolicyLoss", "ScoredRollout", "policy_loss", "resolve", "rollouts_loss"]
