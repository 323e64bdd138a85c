"""How a batch is divided into mini-batches, each of which is one optimizer step: PPO's epochs. Pure.

    batch ─▶ epoch 1: mini-batch 1, 2, … M ─▶ epoch 2: the same groups, dealt anew ─▶ … ─▶ the next version

Groups stay whole: each is in one mini-batch of an epoch. Its rollouts have one baseline, so that their advantages add
up to about zero in each mini-batch, and aggregations that weigh groups find all of each. Advantages are those of the
whole batch; the weights of tokens are computed on each mini-batch, as on a batch of its own.
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
    """How often a batch is gone through, and in how many portions.

    Attributes:
        epochs: passes over the rollouts of a batch. mini_batches: optimizer steps in each.
        target_kl: KL from π_old in nats per token, from which on a batch takes no further step; None for any.
        seed: of the run; what is dealt where is a function of it, the version and the epoch.
    """

    epochs: int = 1
    mini_batches: int = 1
    target_kl: float | None = None
    seed: int = 0

    @property
    def updates(self) -> int:
        """Optimizer steps of a batch, if none is left out."""
        return self.epochs * self.mini_batches

    def dealt(self, sizes: Sequence[int], *, producing: int, epoch: int) -> list[list[int]]:
        """The groups of each mini-batch of an epoch (from 0), by their numbers, ascending.

        Every mini-batch has something to compute: a batch in which fewer groups than `mini_batches` have, has as many.

        Args:
            sizes: of each group the tokens to compute, 0 where it has nothing to teach.
            producing: the version that the batch makes.
        """
        count = max(1, min(self.mini_batches, sum(size > 0 for size in sizes)))
        draw = rng.generator(self.seed, "mini-batches", producing, epoch)
        return deal(sizes, count, draw)

    def exceeded(self, kl: float | None) -> bool:
        """Has the policy gone too far from π_old for another optimizer step?"""
        return self.target_kl is not None and kl is not None and kl > self.target_kl


#: One optimizer step for a batch.
ONE_STEP = MiniBatching()


def deal(sizes: Sequence[int], count: int, draw: np.random.Generator) -> list[list[int]]:
    """Numbers of the groups in each of `count` mini-batches: as many in each, but for one, and of like size together.

    Groups are taken `count` at a time by falling size, and those go one to each mini-batch, drawn by lot. So two
    mini-batches differ by no more than the largest group, and no mini-batch has few long ones: where each mini-batch is
    a mean over its own rollouts, those would count for more.
    """
    order = sorted(draw.permutation(len(sizes)).tolist(), key=lambda group: -sizes[group])
    parts: list[list[int]] = [[] for _ in range(count)]
    for first in range(0, len(order), count):
        for group, part in zip(order[first : first + count], draw.permutation(count).tolist(), strict=False):
            parts[part].append(group)
    return [sorted(part) for part in parts]


class Portion(NamedTuple):
    """One mini-batch: the rollouts to compute, by their numbers in the batch, and what a token of each rollout weighs.

    `token_weights` [B] are 0 for rollouts of other mini-batches.
    """

    members: list[int]
    token_weights: NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPartition:
    """A batch of B rollouts, as far as its division into mini-batches hangs on it.

    Attributes:
        producing: the version that it makes. agg: gives the weights of tokens, on each mini-batch alone.
        groups: [B], index of each rollout's group. lengths: [B], sampled tokens. num_tokens: [B], all tokens.
        learns: [B], who counts in the aggregation. computed: numbers of the rollouts that have something to teach.
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
        """The mini-batches of an epoch, from 0, in the order in which they train."""
        work = np.zeros(len(self.groups), np.intp)
        work[self.computed] = self.num_tokens[self.computed]
        sizes = np.bincount(self.groups, weights=work).astype(int).tolist()
        portions = []
        for part in self.mini_batching.dealt(sizes, producing=self.producing, epoch=epoch):
            inside = np.isin(self.groups, part)
            weights = self.agg.token_weights(lengths=self.lengths, groups=self.groups, valid=self.learns & inside)
            portions.append(Portion([i for i in self.computed if inside[i]], weights))
        return portions
