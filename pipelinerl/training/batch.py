"""From the groups of a step to its micro-batches: advantages and weights on the whole batch, then packing. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.training.packing import WeightedRollout, pack
from pipelinerl.types import Rollout, RolloutGroup
from trainer_contract.types import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """What one optimizer step trains on, and its figures."""

    groups: list[RolloutGroup]
    micro_batches: list[MicroBatch]
    stats: dict[str, float]


def build(
    groups: Sequence[RolloutGroup], *, objective: PolicyObjective, token_budget: int, producing: int
) -> TrainBatch:
    """Weigh and pack the rollouts of `groups` for the step that produces version `producing`.

    A rollout whose gradient is certainly zero is weighed with the others and then left out of the packing.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    index = np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups])
    rewards = np.array([rollout.verdict.reward for rollout in rollouts], np.float64)
    lengths = np.array([rollout.num_sampled_tokens for rollout in rollouts])
    valid = np.array([rollout.verdict.outcome.is_judgement for rollout in rollouts]) & (lengths > 0)
    advantages = objective.adv.advantages(rewards=rewards, groups=index, valid=valid)
    weights = objective.agg.token_weights(lengths=lengths, groups=index, valid=valid)
    weighted = [
        WeightedRollout(rollout=rollout, advantage=advantage, token_weight=weight)
        for rollout, advantage, weight, keep in zip(
            rollouts, advantages.tolist(), weights.tolist(), valid.tolist(), strict=True
        )
        if keep and (advantage != 0.0 or not objective.zero_advantage_is_idle)
    ]
    return TrainBatch(
        groups=list(groups),
        micro_batches=pack(weighted, token_budget=token_budget),
        stats=_stats(
            rollouts,
            rewards=rewards[valid],
            lengths=lengths,
            producing=producing,
            idle=1 - len(weighted) / len(rollouts),
        ),
    )


def _stats(
    rollouts: Sequence[Rollout], *, rewards: np.ndarray, lengths: np.ndarray, producing: int, idle: float
) -> dict[str, float]:
    staleness = np.array([producing - rollout.oldest_version for rollout in rollouts])
    mixed = np.array([rollout.oldest_version != rollout.newest_version for rollout in rollouts])
    return {
        "rollouts": float(len(rollouts)),
        "reward": float(rewards.mean()) if rewards.size else 0.0,
        "tokens": float(sum(rollout.num_tokens for rollout in rollouts)),
        "sampled_tokens": float(lengths.sum()),
        "length_mean": float(lengths.mean()),
        "length_max": float(lengths.max()),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
        "mixed_version_fraction": float(mixed.mean()),
        "unjudged": float(len(rollouts) - rewards.size),
        "idle_fraction": idle,
    }
