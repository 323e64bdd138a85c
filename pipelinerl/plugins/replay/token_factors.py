"""The factors of each token's term in an objective, for given rollouts, and texts with which `explain` prints them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from pipelinerl.errors import UserError
from pipelinerl.objective.losses import ScoredRollout
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.reward import PartReward, Parts, Scored, TurnReward, Turns
from pipelinerl.objective.tokens import Tokens

FORMULA: Final = "J = Σ_{i,t} sg[agg · is_weight] · ( sg[adv] · grad1 + grad2 )"

COSTS: Final[Mapping[str, str]] = {
    "old_logprobs": "a forward pass of the trainer, at the weights that the step starts from",
    "ref_logprobs": "a frozen reference, and a forward pass of it",
    "values": "a critic: its forward pass, and a training step of its own",
    "kl_coefficients": "no pass: a choice among the tokens of the batch, from old_logprobs",
    "vocab_mean_logprobs": "no pass: a sum over the vocabulary in the output layer",
    "vocab_entropies": "no pass: a sum over the vocabulary in the output layer",
}
"""Cost per step of each optional column and of each measure of the output layer."""


def _example(group: int, reward: float, *tokens: tuple[str, float, float, float, float], right: float) -> ScoredRollout:
    """Return a rollout of tokens (text, π_θ, μ = π_old, π_ref, value), rewarded with `right` and one for the format."""
    texts, current, sampler, reference, values = zip(*tokens, strict=True)
    return ScoredRollout(
        tokens=texts,
        reward=reward,
        group=group,
        behavior_logprobs=tuple(map(math.log, sampler)),
        logprobs=tuple(map(math.log, current)),
        old_logprobs=tuple(map(math.log, sampler)),
        ref_logprobs=tuple(map(math.log, reference)),
        values=values,
        parts=(PartReward("right", right), PartReward("format", reward - right)),
    )


EXAMPLE: Final = (
    _example(0, 1.5, ("so", 0.5, 0.5, 0.4, 0.6), ("2", 0.9, 0.6, 0.5, 0.9), right=1.0),
    _example(0, 0.5, ("well", 0.03, 0.01, 0.02, 0.5), (",", 0.8, 0.8, 0.8, 0.5), ("3", 0.1, 0.4, 0.3, 0.4), right=0.0),
    _example(0, 0.0, ("5", 0.02, 0.2, 0.1, 0.2), right=0.0),
    _example(1, 1.0, ("4", 0.7, 0.6, 0.6, 0.7), right=1.0),
    _example(1, 1.0, ("it", 0.2, 0.3, 0.2, 0.6), ("is", 0.9, 0.9, 0.9, 0.7), ("4", 0.6, 0.1, 0.5, 0.8), right=1.0),
    _example(1, 0.0, ("6", 0.3, 0.3, 0.2, 0.4), right=0.0),
)
"""Two groups of three short rollouts. Some tokens have become up to ten times more or less likely since sampling."""


class TokenFactors(NamedTuple):
    """The factors of one token's term in Eq. 3 of the RLAX paper (`FORMULA`).

    Attributes:
        rollout, position, token: the token's rollout, its index among the sampled tokens, and its text.
        agg, is_weight, adv: the token's aggregation weight, importance weight and advantage.
        kept: False if clipping in the policy term (`grad1`) removes the token's gradient.
        truncated: True if the importance weight was truncated.
        multiplier: the full derivative dJ / d log π_θ(token), including the terms of the rollout's other tokens if all
            share one ratio. Terms that read the whole distribution (`log_barrier`, `exact_entropy`) are excluded.
    """

    rollout: int
    position: int
    token: str
    agg: float
    is_weight: float
    adv: float
    kept: bool
    truncated: bool
    multiplier: float


def factors(objective: PolicyObjective, rollouts: Sequence[ScoredRollout]) -> list[TokenFactors]:
    """Return the factors of every sampled token of a batch. Raises UserError if a rollout lacks a needed column."""
    lengths = np.array([len(one.tokens) for one in rollouts])
    groups, valid = np.array([one.group for one in rollouts]), np.array([one.judged for one in rollouts])
    recorded = {name: _joined(rollouts, name) for name in ("behavior_logprobs", "logprobs", *sorted(objective.passes))}
    valid, rewards = valid & (lengths > 0), np.array([one.reward for one in rollouts], np.float64)
    scored = Scored(
        rewards=rewards,
        groups=groups,
        lengths=lengths,
        valid=valid,
        turns=Turns.of([one.turns or (TurnReward(len(one.tokens)),) for one in rollouts]),
        parts=Parts.of([one.parts for one in rollouts], rewards),
    )
    advantages = objective.adv.advantages(scored, {name: recorded[name] for name in objective.adv.needs})
    weights = objective.agg.token_weights(lengths=lengths, groups=groups, valid=valid)
    columns = recorded | {
        "loss_mask": np.repeat(valid, lengths),
        "advantages": advantages,
        "weights": np.repeat(weights, lengths),
        "segment_ids": np.repeat(np.arange(len(rollouts)), lengths),
        "num_segments": len(rollouts),
    }
    columns |= objective.grad2.choices(scored, recorded | {"advantages": advantages})
    tokens = Tokens.of(recorded["logprobs"], columns)
    importance, truncated = objective.is_weight.weight(tokens), objective.is_weight.truncated(tokens)
    clipped, slope = objective.grad1.clipped(tokens), -objective.prediction_gradient(recorded["logprobs"], columns)
    places = [(i, t, text) for i, one in enumerate(rollouts) for t, text in enumerate(one.tokens)]
    return [
        TokenFactors(
            rollout=rollout,
            position=position,
            token=text,
            agg=float(tokens.weights[n]),
            is_weight=float(importance[n]),
            adv=float(advantages[n]),
            kept=not clipped[n],
            truncated=bool(truncated[n]),
            multiplier=float(slope[n]),
        )
        for n, (rollout, position, text) in enumerate(places)
    ]


def _joined(rollouts: Sequence[ScoredRollout], name: str) -> np.ndarray:
    parts = []
    for number, one in enumerate(rollouts):
        column = getattr(one, name)
        if column is None:
            raise UserError(f"rollout {number} has no {name}, which this objective reads; give them, one per token")
        if len(column) != len(one.tokens):
            raise UserError(
                f"rollout {number} has {len(one.tokens)} tokens but {len(column)} {name}; give one per token"
            )
        parts.append(np.asarray(column, np.float64))
    return np.concatenate(parts) if parts else np.zeros(0)


FIELDS: Final = tuple(field.name for field in dataclasses.fields(ScoredRollout))
