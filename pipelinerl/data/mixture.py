"""A weighted mixture of domains: problem i of a run is a pure function of (seed, weights, i)."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from pipelinerl import rng
from pipelinerl.data.source import ProblemSource
from pipelinerl.errors import RecipeError
from pipelinerl.types import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """A source and its share; weights need not sum to 1."""

    name: str
    weight: float
    source: ProblemSource


@final
class Mixture:
    """Draws the domain of problem i by weight, then problem i of that domain's source."""

    def __init__(self, domains: Sequence[Domain], *, seed: int) -> None:
        if not domains or any(not (math.isfinite(domain.weight) and domain.weight > 0) for domain in domains):
            weights = {domain.name: domain.weight for domain in domains}
            raise RecipeError(f"domains must be one or more with positive finite weights, got {weights}")
        self._domains = tuple(domains)
        self._seed = seed

    def domain(self, index: int, weights: Mapping[str, float] | None = None) -> Domain:
        """The domain of problem `index`; `weights` by domain, not all 0, stand in for the domains' own."""
        shares = [domain.weight if weights is None else weights[domain.name] for domain in self._domains]
        cumulative = list(itertools.accumulate(shares))
        mark = float(rng.generator(self._seed, "mixture", index).random()) * cumulative[-1]
        return self._domains[min(bisect.bisect_right(cumulative, mark), len(self._domains) - 1)]

    def problem(self, index: int, weights: Mapping[str, float] | None = None) -> Problem:
        """Problem `index` ≥ 0 of the run; `weights` as for `domain`."""
        return self.domain(index, weights).source.problem(index)
