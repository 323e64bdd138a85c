"""Slots that have no meaning beside one another, or alone, each with the sentence that refuses it."""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.objective.adv import GAE, GroupFiltered, RewardToGo
from pipelinerl.objective.agg import Sequences, Trajectory
from pipelinerl.objective.grad1 import ClippedRatio, GeometricRatio, Level, SequenceRatio
from pipelinerl.objective.grad2 import CappedRatio
from pipelinerl.objective.is_weight import SequenceWeight, TokenRatio, ToprWeight
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.tokens import Policy


def contradictions(objective: PolicyObjective) -> Iterator[str]:
    """A sentence for each thing that makes no sense; it begins with the slot. Nothing when all is well."""
    yield from _of_ratios(objective)
    yield from _of_numbers(objective)
    grad1, adv = objective.grad1, objective.adv
    if grad1.level is Level.SEQUENCE:
        if not isinstance(objective.agg, Trajectory):
            yield (
                "agg must be trajectory beside a ratio of whole sequences (grad1): each token carries the value of its "
                "sequence, so with another denominator a sequence would count once for every token it has"
            )
        if isinstance(adv, GAE) or (isinstance(adv, RewardToGo) and (adv.kl or adv.discount != 1.0)):
            yield (
                "adv must give a sequence one advantage beside a ratio of whole sequences (grad1): take "
                "group_relative, or reward_to_go with discount 1 and without kl"
            )


def _of_ratios(objective: PolicyObjective) -> Iterator[str]:
    weight, grad1, grad2 = objective.is_weight, objective.grad1, objective.grad2
    over = grad1.over if isinstance(grad1, ClippedRatio | SequenceRatio | GeometricRatio) else None
    if over is Policy.CURRENT:
        yield "grad1.over must not be current: the ratio of a policy to itself is 1"
    if isinstance(grad2, CappedRatio) and grad2.over is Policy.CURRENT:
        yield "grad2.over must not be current: the ratio of a policy to itself is 1"
    if not isinstance(weight, TokenRatio | SequenceWeight | ToprWeight):
        return
    if weight.numerator is weight.denominator:
        yield f"is_weight divides {weight.numerator} by itself; take kind 'one' for no weights"
    elif over and weight.numerator is Policy.CURRENT:
        yield (
            "is_weight.numerator must not be current beside a ratio in grad1, which carries the current policy "
            "already: take old (TIS, decoupled PPO), or kind 'one'"
        )
    elif over and weight.denominator is over:
        yield (
            f"is_weight.denominator must not be {over} beside a ratio over {over} in grad1, which divides by it "
            "already: set grad1.over to old (TIS, decoupled PPO), or is_weight to kind 'one'"
        )


def _of_numbers(objective: PolicyObjective) -> Iterator[str]:
    weight, adv, agg = objective.is_weight, objective.adv, objective.agg
    if isinstance(weight, TokenRatio | SequenceWeight) and weight.low > weight.high:
        yield f"is_weight.low must not exceed high, got {weight.low} and {weight.high}"
    if isinstance(adv, GroupFiltered) and adv.keep < 2:
        yield f"adv.keep must be at least 2, got {adv.keep}: one rollout alone has no advantage"
    if isinstance(adv, GAE | RewardToGo) and adv.discount > 1.0:
        yield f"adv.discount must be at most 1, got {adv.discount}"
    if isinstance(adv, GAE) and adv.trace > 1.0:
        yield f"adv.trace must be at most 1, got {adv.trace}"
    if isinstance(agg, Sequences) and agg.length <= 0:
        yield f"agg.length must be positive, got {agg.length}"
