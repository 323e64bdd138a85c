"""Batches and steps with the defaults that most tests of training use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.presets import resolve
from pipelinerl.training.batch import BatchRules, TrainBatch, build
from pipelinerl.training.passes import ForwardPasses
from pipelinerl.training.step import Step
from pipelinerl.types import RolloutGroup


def batch_of(
    groups: Sequence[RolloutGroup],
    objective: PolicyObjective | str | Mapping[str, Any] = "grpo",
    *,
    producing: int = 1,
    token_budget: int = 1000,
    **rules: Any,
) -> TrainBatch:
    """Build a batch; `objective` may be given as in a recipe, and `rules` are fields of `BatchRules`."""
    chosen = objective if isinstance(objective, PolicyObjective) else resolve(objective)
    return build(groups, BatchRules(token_budget=token_budget, **rules), objective=chosen, producing=producing)


def step_on(passes: ForwardPasses, **fields: Any) -> Step:
    """Return a step on these workers, for batches that are built separately."""
    return Step(rules=BatchRules(token_budget=1000), passes=passes, **fields)
