"""Rewards of a step, their division by turn and by part (the terms of a weighted sum), and their shaping.

`RewardShaping` transforms verifier rewards before advantages, as in ROLL's RLVR pipeline. Its optional steps are, in
order: overlong penalty (DAPO), normalisation, clipping, scaling.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


class TurnReward(NamedTuple):
    """One turn, for credit assignment: its number of sampled tokens, the environment's reward for it, and its agent."""

    num_tokens: int
    reward: float = 0.0
    agent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """The turns of B rollouts, [M], concatenated by rollout and ordered by end time within each rollout.

    Attributes:
        counts: [B], the number of turns in each rollout.
        lengths: [M], the number of tokens that the model sampled in each turn.
        rewards: [M], the environment's reward of each turn.
        places: [M], equal numbers for turns that are the k-th turn of the same agent in their rollouts; within a group,
            such turns are compared with each other.
    """

    counts: Ints
    lengths: Ints
    rewards: Floats
    places: Ints

    @classmethod
    def of(cls, rollouts: Sequence[Sequence[TurnReward]]) -> Self:
        places: dict[tuple[str, int], int] = {}
        placed: list[int] = []
        for turns in rollouts:
            seen: Counter[str] = Counter()
            for turn in turns:
                placed.append(places.setdefault((turn.agent, seen[turn.agent]), len(places)))
                seen[turn.agent] += 1
        flat = [turn for turns in rollouts for turn in turns]
        return cls(
            counts=np.array([len(turns) for turns in rollouts], np.int64),
            lengths=np.array([turn.num_tokens for turn in flat], np.int64),
            rewards=np.array([turn.reward for turn in flat], np.float64),
            places=np.array(placed, np.int64),
        )

    def rewards_to_go(self, rewards: Floats) -> Floats:
        """Return each turn's reward-to-go, [M]: G_{i,k} = R_i − Σ_{k' < k} r_{i,k'}; `rewards` [B] holds the R_i."""
        before = np.cumsum(self.rewards) - self.rewards
        starts = np.cumsum(self.counts) - self.counts
        has_turns = self.counts > 0
        offsets = np.zeros(self.counts.shape)
        offsets[has_turns] = before[starts[has_turns]]
        return np.asarray(np.repeat(rewards + offsets, self.counts) - before)


class PartReward(NamedTuple):
    """One term of a rollout's reward: its name, its unweighted value, and its weight."""

    name: str
    reward: float
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The P parts of the rewards of B rollouts: a reward is the sum of `weights` [B, P] times `rewards` [B, P].

    If a rollout lacks a part, the part's weight is 0. If a rollout lacks all parts, its whole reward is its only part.
    """

    rewards: Floats
    weights: Floats

    @classmethod
    def of(cls, rollouts: Sequence[Sequence[PartReward]], rewards: Floats) -> Self:
        named = [parts or (PartReward("", reward),) for parts, reward in zip(rollouts, rewards.tolist(), strict=True)]
        names = sorted({name for parts in named for name, _, _ in parts})
        table = np.zeros((2, len(named), len(names)))
        for row, parts in enumerate(named):
            for name, reward, weight in parts:
                table[:, row, names.index(name)] = reward, weight
        return cls(rewards=table[0], weights=table[1])


class Roles(NamedTuple):
    """The name of each turn's role [M] (domain and agent), and each role's baseline when the step begins."""

    names: Sequence[str]
    baselines: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Facts about the B rollouts of a step from which advantages and weights are computed; arrays are [B].

    Attributes:
        rewards: shaped rewards; any value where `valid` is False.
        groups: index of each rollout's group; any integers.
        lengths: the number of tokens that the model sampled.
        valid: False if the verifier reached no verdict, or the rollout has nothing to train on.
        turns, parts: the turns of the rollouts and the parts of their rewards; None if each rollout is one turn, or
            each reward one part.
        roles: the roles of the turns, for baselines that persist across steps; None if all turns have the same role.
    """

    rewards: Floats
    groups: Ints
    lengths: Ints
    valid: Bools
    turns: Turns | None = None
    parts: Parts | None = None
    roles: Roles | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def known(self) -> Floats:
        return np.where(self.valid, self.rewards, 0.0).astype(np.float64)

    @property
    def judged(self) -> Bools:
        return np.repeat(self.valid, self.lengths)

    def by_turns(self, turns: Turns) -> Scored:
        """Return a copy with turns as rollouts, by their reward-to-go; an agent's k-th turns form a group."""
        pairs = np.stack([np.repeat(self.groups, turns.counts), turns.places])
        _, same_turn = np.unique(pairs, axis=1, return_inverse=True)
        return Scored(
            rewards=turns.rewards_to_go(self.known),
            groups=same_turn.reshape(-1),
            lengths=turns.lengths,
            valid=np.repeat(self.valid, turns.counts),
        )


class NormalizationScope(StrEnum):
    """The rollouts over which a mean or a deviation is computed."""

    NONE = "none"
    """No rollouts: subtract nothing, or divide by nothing."""
    GROUP = "group"
    """The judged rollouts of one group."""
    BATCH = "batch"
    """The judged rollouts of the domain in this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardShaping:
    """The shaping of a domain's rewards; the default leaves them unchanged.

    Attributes:
        overlong_tokens: L_max of DAPO's soft overlong punishment (Yu et al. 2025, Eq. 13); 0 disables it. The penalty
            grows linearly from 0 at L_max − overlong_margin sampled tokens to 1 at L_max and beyond.
        overlong_margin: L_cache, the tokens over which the penalty grows.
        mean, std: scopes (group or batch) of the mean that is subtracted and of the deviation (ddof 0, plus `epsilon`)
            that divides. Group mean with batch deviation is ROLL's reinforce++ baseline.
        low, high: bounds to which the normalised reward is clipped.
        scale: factor, applied last.
        part_weights: names and weights of the parts whose sum is the reward, for `adv = "decoupled"`.
    """

    overlong_tokens: int = 0
    overlong_margin: int = 0
    mean: NormalizationScope = NormalizationScope.NONE
    std: NormalizationScope = NormalizationScope.NONE
    epsilon: float = 1e-6
    low: float = -math.inf
    high: float = math.inf
    scale: float = 1.0
    part_weights: tuple[tuple[str, float], ...] = ()

    @property
    def rescales(self) -> bool:
        """True if any of normalisation, clipping and scaling is enabled; the overlong penalty does not count."""
        plain = RewardShaping(overlong_tokens=self.overlong_tokens, overlong_margin=self.overlong_margin)
        return self != replace(plain, epsilon=self.epsilon, part_weights=self.part_weights)

    def parts(self, named: Sequence[tuple[str, float]]) -> tuple[PartReward, ...]:
        """Return those of the rewards `named` (name, reward) that have a weight in `part_weights`, with that weight."""
        weights = dict(self.part_weights)
        return tuple(PartReward(name, reward, weights[name]) for name, reward in named if name in weights)

    def contradictions(self) -> Iterator[str]:
        if self.low > self.high:
            yield f"low must not exceed high, got {self.low:g} and {self.high:g}"
        if self.overlong_margin > self.overlong_tokens:
            yield (
                f"overlong_margin ({self.overlong_margin}) must not exceed overlong_tokens ({self.overlong_tokens}): "
                "it is the last part of that length"
            )
        if self.scale <= 0 or not math.isfinite(self.scale):
            yield f"scale must be positive and finite, got {self.scale:g}"
        if self.epsilon < 0:
            yield f"epsilon must not be negative, got {self.epsilon:g}"

    def apply(self, *, rewards: Floats, groups: Ints, lengths: Ints, valid: Bools) -> Floats:
        """Return the shaped rewards [B] of one domain's rollouts; 0 where `valid` is False. Columns are [B]."""
        shaped = np.where(valid, rewards, 0.0).astype(np.float64)
        if self.overlong_tokens:
            most, margin = self.overlong_tokens, self.overlong_margin
            if margin:
                shaped = shaped + np.clip((most - margin - lengths) / margin, -1.0, 0.0)
            else:
                shaped = shaped - (lengths > most)
        centre = _mean(shaped, groups, valid, self.mean)
        deviation = np.sqrt(_mean((shaped - _mean(shaped, groups, valid, self.std)) ** 2, groups, valid, self.std))
        shaped = shaped - centre
        if self.std is not NormalizationScope.NONE:
            shaped = shaped / (deviation + self.epsilon)
        return np.where(valid, np.clip(shaped, self.low, self.high) * self.scale, 0.0)


def _mean(amounts: Floats, groups: Ints, valid: Bools, over: NormalizationScope) -> Floats:
    """Return for each rollout the mean of valid `amounts` over its group or the batch; 0 if `over` is NONE."""
    if over is NormalizationScope.NONE:
        return np.zeros_like(amounts)
    index = (
        np.unique(groups, return_inverse=True)[1]
        if over is NormalizationScope.GROUP
        else np.zeros(groups.shape, np.int64)
    )
    sums = np.bincount(index, weights=np.where(valid, amounts, 0.0), minlength=1)
    counts = np.bincount(index, weights=valid.astype(np.float64), minlength=1)
    return np.asarray((sums / np.maximum(counts, 1.0))[index])
