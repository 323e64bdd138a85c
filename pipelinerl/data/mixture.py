"""A weighted mixture of domains: problem i of a run is a pure function of (seed, quota, weights, i).

Domains get their shares by a quota, not by chance. Problems come in blocks of `quota.size`, the groups of one step. On
the line of cumulative weights, each domain is an interval. A block places `size` evenly spaced points on that line, and
a domain gets as many problems as points fall into its interval (systematic sampling, Madow and Madow 1944): the floor
or ceiling of size × share.

The first point moves by the golden ratio from block to block, which gives the sequence of lowest discrepancy. A
domain's count over any number of blocks therefore stays within a few problems of its share. Order within a block is
shuffled by seed.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pipelinerl import rng
from pipelinerl.data.files.source import RowSource
from pipelinerl.data.source import ProblemSource
from pipelinerl.errors import RecipeError
from pipelinerl.types import Problem, Quota

#: Golden ratio conjugate, (√5 − 1) / 2.
_GOLDEN: Final = (math.sqrt(5.0) - 1.0) / 2.0
#: Quota with blocks of one problem, for which the shares of the domains hold only over many problems.
_NO_BLOCKS: Final = Quota(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """A source and its weight in the mixture; weights need not sum to 1."""

    name: str
    weight: float
    source: ProblemSource


def groups_of_step(rollouts: int, sizes: Mapping[str, int], weights: Mapping[str, float]) -> int:
    """Return the number of groups in a step of about `rollouts`, given each domain's group size and weight.

    The step has exactly `rollouts` if all domains have the same group size and it divides `rollouts`.
    """
    mean = sum(weights[name] * size for name, size in sizes.items()) / sum(weights[name] for name in sizes)
    return max(1, round(rollouts / mean))


class Mixture:
    """A weighted mixture: it chooses the domain of problem i by quota, and takes problem i of that domain's source."""

    def __init__(self, domains: Sequence[Domain], *, seed: int, quota: Quota = _NO_BLOCKS) -> None:
        """Create the mixture. `quota` gives the size of the blocks; methods use it if their caller passes none."""
        if not domains or any(not (math.isfinite(domain.weight) and domain.weight > 0) for domain in domains):
            weights = {domain.name: domain.weight for domain in domains}
            raise RecipeError(f"domains must be one or more with positive finite weights, got {weights}")
        self._domains = tuple(domains)
        self._seed = seed
        self._quota = quota
        # The latest block (with its quota), and the order of its problems.
        self._permutation: tuple[tuple[Quota, int], list[int]] = ((quota, -1), [])

    def domain(self, index: int, weights: Mapping[str, float] | None = None, quota: Quota | None = None) -> Domain:
        """Return the domain of problem `index`. `weights` (by domain name, not all 0) replace the domains' weights."""
        shares = [domain.weight if weights is None else weights[domain.name] for domain in self._domains]
        cumulative = list(itertools.accumulate(shares))
        quota = quota or self._quota
        block, place = divmod(index - quota.since, quota.size)
        first = (rng.key(self._seed, "quota", quota.since) / 2**63 + block * _GOLDEN) % 1.0
        if self._permutation[0] != (quota, block):
            noise = rng.generator(self._seed, "quota", quota.since, block)
            self._permutation = (quota, block), noise.permutation(quota.size).tolist()
        mark = (self._permutation[1][place] + first) / quota.size * cumulative[-1]
        chosen = min(bisect.bisect_right(cumulative, mark), len(shares) - 1)
        while shares[chosen] == 0.0:  # rounding errors may select a domain behind the last one with a positive share
            chosen -= 1
        return self._domains[chosen]

    def problem(
        self, index: int, weights: Mapping[str, float] | None = None, quota: Quota | None = None, ahead: int = 0
    ) -> Problem:
        """Return the run's problem `index` ≥ 0: problem `index + ahead` of its domain's source, after `ahead` skips."""
        return self.domain(index, weights, quota).source.problem(index + ahead)

    def row_counts(self) -> list[str]:
        """Return a sentence for each domain that reads rows: how many it read and dropped, and why."""
        sources = ((domain.name, domain.source) for domain in self._domains)
        return [f"domains.{name}: {source.summary}" for name, source in sources if isinstance(source, RowSource)]
