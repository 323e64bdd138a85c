"""Division of a batch into mini-batches, each of which is one optimizer step: PPO's epochs. Pure.

    batch ─▶ epoch 1: mini-batch 1, 2, … M ─▶ epoch 2: the same groups in another division ─▶ … ─▶ the next version

Groups stay whole: each is in one mini-batch of an epoch. Rollouts of a group share a baseline, so their advantages add
up to about zero in each mini-batch, and aggregations that weigh groups see all of each. Advantages are those of the
whole batch; the weights of tokens are computed on each mini-batch alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from pipelinerl import rng
from pipelinerl.objective.agg import Aggregation


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatching:
    """The number of passes over a batch and of mini-batches in each.

    Attributes:
        epochs: passes over the rollouts of a batch. mini_batches: optimizer steps in each.
        target_kl: KL from π_old in nats per token beyond which a batch takes no further step; None for no bound.
        seed: of the run; the division is a function of it, the version and the epoch.
    """

    epochs: int = 1
    mini_batches: int = 1
    target_kl: float | None = None
    seed: int = 0

    @property
    def updates(self) -> int:
        """Optimizer steps of a batch that does not end early."""
        return self.epochs * self.mini_batches

    def dealt(self, sizes: Sequence[int], *, producing: int, epoch: int) -> list[list[int]]:
        """Return the groups of each mini-batch of an epoch (from 0), by their numbers, ascending.

        Every mini-batch has something to compute: the number of mini-batches is at most the number of groups that
        teach.

        Args:
            sizes: tokens to compute in each group, 0 if it has nothing to teach.
            producing: the version that the batch produces.
        """
        count = max(1, min(self.mini_batches, sum(size > 0 for size in sizes)))
        draw = rng.generator(self.seed, "mini-batches", producing, epoch)
        return deal(sizes, count, draw)

    def exceeded(self, kl: float | None) -> bool:
        """Return whether the policy is too far from π_old for another optimizer step."""
        return self.target_kl is not None and kl is not None and kl > self.target_kl


#: One optimizer step per batch.
ONE_STEP = MiniBatching()


def deal(sizes: Sequence[int], count: int, draw: np.random.Generator) -> list[list[int]]:
    """Return the numbers of the groups in each of `count` mini-batches, with counts that differ by at most one.

    Groups are taken `count` at a time by falling size, and each mini-batch draws one of them. So two mini-batches
    differ by no more than the largest group, and none has only a few long groups. Where each mini-batch is a mean over
    its own rollouts, such groups would weigh more.
    """
    order = sorted(draw.permutation(len(sizes)).tolist(), key=lambda group: -sizes[group])
    parts: list[list[int]] = [[] for _ in range(count)]
    for first in range(0, len(order), count):
        for group, part in zip(order[first : first + count], draw.permutation(count).tolist(), strict=False):
            parts[part].append(group)
    return [sorted(part) for part in parts]


class Portion(NamedTuple):
    """One mini-batch: the rollouts to compute, by their numbers in the batch, and the weight of each rollout's tokens.

    `token_weights` [B] are 0 for rollouts of other mini-batches.
    """

    members: list[int]
    token_weights: NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPartition:
    """The facts about a batch of B rollouts on which its division into mini-batches depends.

    Attributes:
        producing: the version that it produces. agg: weighs the tokens of each mini-batch alone.
        groups: [B], index of each rollout's group. lengths: [B], sampled tokens. num_tokens: [B], all packed tokens.
        learns: [B], True if the rollout counts in the aggregation. computed: numbers of the rollouts that can teach.
    """

    mini_batching: MiniBatching
    producing: int
    agg: Aggregation
    groups: NDArray[np.intp]
    lengths: NDArray[np.intp]
    num_tokens: NDArray[np.intp]
    learns: NDArray[np.bool_]
    computed: list[int]

    def portions(self, epoch: int) -> list[Portion]:
        """Return the mini-batches of an epoch, from 0, in the order in which they train."""
        work = np.zeros(len(self.groups), np.intp)
        work[self.computed] = self.num_tokens[self.computed]
        sizes = np.bincount(self.groups, weights=work).astype(int).tolist()
        portions = []
        for part in self.mini_batching.dealt(sizes, producing=self.producing, epoch=epoch):
            inside = np.isin(self.groups, part)
            weights = self.agg.token_weights(lengths=self.lengths, groups=self.groups, valid=self.learns & inside)
            portions.append(Portion([i for i in self.computed if inside[i]], weights))
        return portions
