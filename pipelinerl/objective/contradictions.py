"""Checks of an objective's five terms (slots): contradictions, and choices that are doubtful in a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipelinerl.objective.grad1 import Level
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.tokens import Policy


def contradictions(objective: PolicyObjective) -> Iterator[str]:
    """Yield a sentence for each combination of slots that makes no sense, beginning with the name of a slot."""
    agg, weight, adv, grad1 = objective.agg, objective.is_weight, objective.adv, objective.grad1
    over = grad1.over
    if over is Policy.CURRENT:
        yield "grad1.over must not be current: the ratio of a policy to itself is 1"
    if weight.numerator is not None and weight.numerator is weight.denominator:
        yield f"is_weight divides {weight.numerator} by itself; take kind 'one' for no weights"
    elif over and weight.numerator is Policy.CURRENT:
        yield (
            "is_weight.numerator must not be current with a ratio in grad1, which carries the current policy "
            "already: take old (TIS, decoupled PPO), or kind 'one'"
        )
    elif over and weight.denominator is over:
        yield (
            f"is_weight.denominator must not be {over} with a ratio over {over} in grad1, which divides by it "
            "already: set grad1.over to old (TIS, decoupled PPO), or is_weight to kind 'one'"
        )
    for slot, bounded in (("is_weight", weight), ("adv", adv)):
        low, high = getattr(bounded, "low", 0.0), getattr(bounded, "high", math.inf)
        if low > high:
            yield f"{slot}.low must not exceed high, got {low} and {high}"
    for problems in (agg.problems(), adv.problems(), grad1.problems(), objective.grad2.problems()):
        yield from problems
    if adv.is_zero and objective.grad2.is_zero:
        yield "adv.value must not be 0 with grad2 none: nothing is left to train; take grad2 = 'kl'"
    if grad1.level is Level.SEQUENCE:
        if not (agg.by_length or (agg.constant is not None and grad1.may_weigh_by_length)):
            yield (
                "agg must be trajectory with a ratio of whole sequences (grad1): each token carries the value of its "
                "sequence, so with another denominator a sequence would count once for every token it has"
            )
        if adv.uneven:
            yield adv.uneven


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings of a run that decide whether a slot has any effect.

    Attributes:
        group_sizes: rollouts per group, for each recipe setting that gives a group size (by the setting's name).
        step_begins_at: policies, such as π_old, that equal the current policy when a step begins.
        updates: optimizer steps per training step. If it is 1, the ratio to a policy in `step_begins_at` is always 1.
    """

    group_sizes: Mapping[str, int]
    max_tokens: int
    step_begins_at: frozenset[Policy] = frozenset()
    updates: int = 1

    @property
    def always_current(self) -> frozenset[Policy]:
        """Policies that equal the current policy at every evaluation of the loss, so that their ratio is always 1."""
        return self.step_begins_at if self.updates == 1 else frozenset()


def doubts(objective: PolicyObjective, setting: Setting) -> Iterator[str]:
    """Yield a warning for each part (slot) of the objective that probably does not do what its author intended."""
    weight, over, constant = objective.is_weight, objective.grad1.over, objective.agg.constant
    if over in setting.always_current:
        yield (
            f"grad1 clips π_θ/π_{over}, which is always 1 here: a batch is one optimizer step, and "
            "training.old_logprobs = 'recompute' takes π_old from the weights that this step starts from; "
            "training.epochs or training.mini_batches make it several, 'sampling_weights' makes π_old the policy that "
            "sampled, grad1.over = 'behavior' the sampler's log-probs"
        )
    pair = {weight.numerator, weight.denominator}
    if Policy.CURRENT in pair and pair & setting.always_current:
        yield "is_weight divides by the policy that the step starts from and is always 1; divide by behavior"
    if setting.updates > 1 and over is None and Policy.CURRENT not in pair:
        yield (
            f"grad1 and is_weight hold no ratio of the current policy, and a batch is {setting.updates} optimizer "
            "steps: the later ones ignore that the policy has moved since; take a clipped ratio as grad1, or "
            "leave out training.epochs and training.mini_batches"
        )
    yield from objective.grad2.doubts(setting.always_current, weighted=weight.numerator is not None)
    if isinstance(constant, float) and constant not in (1.0, float(setting.max_tokens)):
        yield (
            f"agg.length is {constant:g}, and answers have at most sampling.max_tokens = {setting.max_tokens}: the "
            f"loss is {setting.max_tokens / constant:.3g} times what agg.length = 'max_tokens' makes it"
        )
