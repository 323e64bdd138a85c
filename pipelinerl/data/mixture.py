"""A weighted mixture of domains: problem i of a run is a pure function of (seed, quota, weights, i).

Domains are not drawn but apportioned. Orders come in blocks of `size`, a step's groups. A block has S marks at even
distances on the line of the weights, and a domain's share is what falls into its part (systematic sampling, Madow and
Madow 1944): floor or ceil of size × its share, and exactly that where it is whole. Where the first mark of block b lies
moves by the golden ratio from block to block, the sequence of lowest discrepancy, so that over any run of blocks, too,
a domain is a few orders from its share at most. Within a block the order is a permutation by the seed.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from pipelinerl import rng
from pipelinerl.data.source import ProblemSource
from pipelinerl.errors import RecipeError
from pipelinerl.types import Problem, Quota

#: (√5 − 1) / 2.
_GOLDEN: Final = (math.sqrt(5.0) - 1.0) / 2.0
#: Every problem for itself: shares hold over runs of problems alone.
_NO_BLOCKS: Final = Quota(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """A source and its share; weights need not sum to 1."""

    name: str
    weight: float
    source: ProblemSource


def groups_of_step(rollouts: int, sizes: Mapping[str, int], weights: Mapping[str, float]) -> int:
    """How many groups make a step of so many rollouts, to the nearest, where domains of these weights have groups of
    these sizes; exactly so many where all sizes are one that divides it."""
    mean = sum(weights[name] * size for name, size in sizes.items()) / sum(weights[name] for name in sizes)
    return max(1, round(rollouts / mean))


@final
class Mixture:
    """Says the domain of problem i by quota, and then takes problem i of that domain's source."""

    def __init__(self, domains: Sequence[Domain], *, seed: int, quota: Quota = _NO_BLOCKS) -> None:
        """`quota` is for problems that are asked for without one."""
        if not domains or any(not (math.isfinite(domain.weight) and domain.weight > 0) for domain in domains):
            weights = {domain.name: domain.weight for domain in domains}
            raise RecipeError(f"domains must be one or more with positive finite weights, got {weights}")
        self._domains = tuple(domains)
        self._seed = seed
        self._quota = quota
        self._permutation: tuple[tuple[Quota, int], list[int]] = ((quota, -1), [])  # of the block last asked for

    def domain(self, index: int, weights: Mapping[str, float] | None = None, quota: Quota | None = None) -> Domain:
        """The domain of problem `index`; `weights` by domain, not all 0, stand in for the domains' own."""
        shares = [domain.weight if weights is None else weights[domain.name] for domain in self._domains]
        cumulative = list(itertools.accumulate(shares))
        quota = quota or self._quota
        block, place = divmod(index - quota.since, quota.size)
        first = (rng.key(self._seed, "quota", quota.since) / 2**63 + block * _GOLDEN) % 1.0
        mark = (self._places(quota, block)[place] + first) / quota.size * cumulative[-1]
        chosen = min(bisect.bisect_right(cumulative, mark), len(shares) - 1)
        while shares[chosen] == 0.0:  # rounding may lead beyond the last that has a share
            chosen -= 1
        return self._domains[chosen]

    def problem(
        self, index: int, weights: Mapping[str, float] | None = None, quota: Quota | None = None, ahead: int = 0
    ) -> Problem:
        """Problem `index` ≥ 0 of the run, or the one of its domain that comes `ahead` turns later.

        `weights` and `quota` are as for `domain`.
        """
        return self.domain(index, weights, quota).source.problem(index + ahead)

    def _places(self, quota: Quota, block: int) -> list[int]:
        """Which of its marks each order of a block has."""
        if self._permutation[0] != (quota, block):
            noise = rng.generator(self._seed, "quota", quota.since, block)
            self._permutation = (quota, block), noise.permutation(quota.size).tolist()
        return self._permutation[1]
