"""Checks of an objective's five terms (slots): contradictions, slots without effect in a run, doubtful choices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

from pipelinerl.objective.adv import (
    GAE,
    Baseline,
    Constant,
    CovarianceClipped,
    GroupFiltered,
    GroupRelative,
    RewardToGo,
    RoleBaseline,
    Scale,
    credits_turns,
)
from pipelinerl.objective.agg import Length, Sequences, Trajectory
from pipelinerl.objective.grad1 import Level, OverPolicy, QuadraticRatio, SequenceRatio, SoftGate
from pipelinerl.objective.grad2 import CovariancePenalty, Estimator, KLPenalty, NoRegularizer
from pipelinerl.objective.is_weight import Ratio, SequenceWeight, TokenRatio, Unweighted
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.tokens import Policy


def contradictions(objective: PolicyObjective) -> Iterator[str]:
    """Yield a sentence for each combination of slots that makes no sense, beginning with the name of a slot."""
    yield from _of_ratios(objective)
    yield from _of_numbers(objective)
    grad1, grad2, adv = objective.grad1, objective.grad2, objective.adv
    if isinstance(adv, Constant) and not adv.value and isinstance(grad2, NoRegularizer):
        yield "adv.value must not be 0 with grad2 none: nothing is left to train; take grad2 = 'kl'"
    if isinstance(grad2, KLPenalty) and grad2.beta:
        if grad2.to is Policy.CURRENT:
            yield "grad2.to must not be current: the KL of a policy from itself is 0"
        if grad2.estimator is Estimator.K3_WEIGHTED and grad2.over is Policy.CURRENT:
            yield "grad2.over must not be current: the ratio of a policy to itself is 1; take estimator 'k3'"
    if grad1.level is Level.SEQUENCE:
        # Only LUSPO may use another aggregation: it multiplies a ratio of sequences by the length.
        by_length = isinstance(grad1, SequenceRatio) and isinstance(objective.agg, Sequences)
        if not (by_length or isinstance(objective.agg, Trajectory)):
            yield (
                "agg must be trajectory with a ratio of whole sequences (grad1): each token carries the value of its "
                "sequence, so with another denominator a sequence would count once for every token it has"
            )
        if isinstance(adv, GAE) or (isinstance(adv, RewardToGo) and (adv.kl or adv.discount != 1.0)):
            yield (
                "adv must give a sequence one advantage with a ratio of whole sequences (grad1): take "
                "group_relative, or reward_to_go with discount 1 and without kl"
            )
        if credits_turns(adv) and not isinstance(adv, RoleBaseline):
            yield (
                "adv.credit must be episode with a ratio of whole sequences (grad1): its tokens share one advantage; "
                "take a ratio of tokens"
            )
        if isinstance(adv, CovarianceClipped | RoleBaseline):
            yield "adv must give a sequence one advantage with a ratio of whole sequences (grad1): take group_relative"


def _of_ratios(objective: PolicyObjective) -> Iterator[str]:
    weight = objective.is_weight
    over = _over(objective)
    if over is Policy.CURRENT:
        yield "grad1.over must not be current: the ratio of a policy to itself is 1"
    if not isinstance(weight, Ratio):
        return
    if weight.numerator is weight.denominator:
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


def _of_numbers(objective: PolicyObjective) -> Iterator[str]:
    weight, adv, agg = objective.is_weight, objective.adv, objective.agg
    if isinstance(weight, TokenRatio | SequenceWeight) and weight.low > weight.high:
        yield f"is_weight.low must not exceed high, got {weight.low} and {weight.high}"
    if isinstance(adv, GroupFiltered) and adv.keep < 2:
        yield f"adv.keep must be at least 2, got {adv.keep}: one rollout alone has no advantage"
    if isinstance(adv, RoleBaseline) and adv.decay >= 1.0:
        yield f"adv.decay must be below 1, got {adv.decay}: the baseline would never change"
    if isinstance(adv, CovarianceClipped) and adv.low > adv.high:
        yield f"adv.low must not exceed high, got {adv.low} and {adv.high}"
    if isinstance(adv, GAE | RewardToGo) and adv.discount > 1.0:
        yield f"adv.discount must be at most 1, got {adv.discount}"
    if isinstance(adv, GAE) and adv.trace > 1.0:
        yield f"adv.trace must be at most 1, got {adv.trace}"
    grad1 = objective.grad1
    if isinstance(grad1, QuadraticRatio) and grad1.epsilon == 0:
        yield "grad1.epsilon must be positive, got 0: it divides the penalty"
    if isinstance(grad1, SoftGate) and not (grad1.positive and grad1.negative):
        yield "grad1.positive and grad1.negative must be positive: they divide the gate"
    if isinstance(agg, Sequences) and not isinstance(agg.length, Length) and agg.length <= 0:
        yield f"agg.length must be positive, got {agg.length}"


@final
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


def without_effect(objective: PolicyObjective, setting: Setting) -> Iterator[str]:
    """Yield a sentence for each slot that cannot work as intended in this run, beginning with the slot's name."""
    adv = objective.adv
    for key, size in setting.group_sizes.items():
        if isinstance(adv, GroupFiltered) and adv.keep >= size:
            yield (
                f"adv.keep ({adv.keep}) must be below {key} ({size}): as it is every rollout of a group is "
                "kept, and nothing is filtered"
            )
        if isinstance(adv, CovarianceClipped) and size == 1:
            yield f"adv covariance_clipped needs groups, and {key} is 1: every advantage would be 0; raise it"
        if isinstance(adv, GroupRelative) and size == 1:
            if adv.baseline is not Baseline.NONE:
                yield (
                    f"adv.baseline {adv.baseline} needs groups, and {key} is 1: every advantage would be 0; "
                    'raise it, or take adv = "reward_to_go" or adv.baseline = "none" with adv.scale = "none"'
                )
            elif adv.scale in (Scale.STD, Scale.MEAN):
                quotient = "the deviation of one reward is 0" if adv.scale is Scale.STD else "a reward over itself is 1"
                yield (
                    f"adv.scale {adv.scale} needs groups, and {key} is 1: {quotient}; raise it, "
                    'or take adv.scale = "batch" or "none"'
                )


def doubts(objective: PolicyObjective, setting: Setting) -> Iterator[str]:
    """Yield a warning for each part (slot) of the objective that probably does not do what its author intended."""
    agg, weight, grad2, over = objective.agg, objective.is_weight, objective.grad2, _over(objective)
    if over in setting.always_current:
        yield (
            f"grad1 clips π_θ/π_{over}, which is always 1 here: a batch is one optimizer step, and "
            "training.old_logprobs = 'recompute' takes π_old from the weights that this step starts from; "
            "training.epochs or training.mini_batches make it several, 'sampling_weights' makes π_old the policy that "
            "sampled, grad1.over = 'behavior' the sampler's log-probs"
        )
    pair = {getattr(weight, name, None) for name in ("numerator", "denominator")}
    if Policy.CURRENT in pair and pair & setting.always_current:
        yield "is_weight divides by the policy that the step starts from and is always 1; divide by behavior"
    if setting.updates > 1 and over is None and Policy.CURRENT not in pair:
        yield (
            f"grad1 and is_weight hold no ratio of the current policy, and a batch is {setting.updates} optimizer "
            "steps: the later ones ignore that the policy has moved since; take a clipped ratio as grad1, or "
            "leave out training.epochs and training.mini_batches"
        )
    if isinstance(grad2, KLPenalty) and grad2.beta and grad2.to in setting.always_current:
        yield f"grad2 penalises the KL to π_{grad2.to}, from which the step starts, and is always 0; take behavior"
    if isinstance(grad2, CovariancePenalty) and Policy.OLD in setting.always_current:
        yield (
            "grad2 kl_cov penalises the distance to π_old, from which the step starts, and has no gradient there; "
            "raise training.epochs or training.mini_batches"
        )
    if isinstance(agg, Sequences) and agg.length not in (1.0, float(setting.max_tokens), Length.MAX_TOKENS):
        yield (
            f"agg.length is {agg.length:g}, and answers have at most sampling.max_tokens = {setting.max_tokens}: the "
            f"loss is {setting.max_tokens / agg.length:.3g} times what agg.length = 'max_tokens' makes it"
        )
    if (
        isinstance(grad2, KLPenalty)
        and grad2.beta
        and grad2.estimator is Estimator.K1
        and isinstance(weight, Unweighted)
    ):
        yield "grad2.estimator k1 has no gradient in expectation without importance weights; take k3, k2, or adv.kl"


def _over(objective: PolicyObjective) -> Policy | None:
    grad1 = objective.grad1
    return grad1.over if isinstance(grad1, OverPolicy) else None
