"""Term (slot) `agg` of RLAX Eq. 3: the weight of each token, computed once on the whole batch before packing.

Rollouts without a verdict or without sampled tokens have weight 0 and are excluded from every denominator. The
weights of `Trajectory`, `Group` and `Batch` sum to 1 over the tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Final, Protocol

import numpy as np

from pipelinerl.errors import UserError
from pipelinerl.objective.reward import Bools, Floats, Ints


class Length(StrEnum):
    """A length given in the recipe not as a number but as the name of another setting."""

    MAX_TOKENS = "max_tokens"
    """L_max: the maximum number of tokens in an answer, `sampling.max_tokens`."""


class Aggregation(Protocol):
    """A rule for token weights. Properties with a body are defaults, which a rule overrides where it differs."""

    @property
    def by_length(self) -> bool:
        """True if the weight is divided by the rollout's length, so that all rollouts of a group weigh the same."""
        return False

    @property
    def constant(self) -> float | Length | None:
        """The constant that divides every token's weight; None if the divisor depends on lengths."""
        return None

    def problems(self) -> Iterator[str]:
        yield from ()

    @property
    def formula(self) -> str:
        """Formula of Agg_{i,t} as text, for Q groups of G rollouts, B rollouts in all."""
        ...

    def token_weights(self, *, lengths: Ints, groups: Ints, valid: Bools) -> Floats:
        """Return each rollout's token weight, [B], from its sampled tokens and its group; 0 if not `valid`."""
        ...


@dataclass(frozen=True, slots=True)
class Trajectory(Aggregation):
    """1 / (Q·G·|o_i|), as in GRPO's Eq. 3: groups, their rollouts, and a rollout's tokens weigh the same."""

    formula: ClassVar = "1/(Q·G·|o_i|)"
    by_length: ClassVar = True

    def token_weights(self, *, lengths: Ints, groups: Ints, valid: Bools) -> Floats:
        counted = valid & (lengths > 0)
        num_groups, size = _totals(counted.astype(np.float64), groups, counted)
        return _inverse(num_groups * size * lengths, counted)


@dataclass(frozen=True, slots=True)
class Group(Aggregation):
    """1 / (Q·Σ_group |o|) for Q groups: groups and tokens in a group weigh the same. DAPO, as RLAX interprets it."""

    formula: ClassVar = "1/(Q·Σ_g |o|)"

    def token_weights(self, *, lengths: Ints, groups: Ints, valid: Bools) -> Floats:
        counted = valid & (lengths > 0)
        num_groups, tokens = _totals(np.where(counted, lengths, 0).astype(np.float64), groups, counted)
        return _inverse(num_groups * tokens, counted)


@dataclass(frozen=True, slots=True)
class Batch(Aggregation):
    """1 / Σ_batch |o|: equal weight for every token of the batch."""

    formula: ClassVar = "1/Σ_batch |o|"

    def token_weights(self, *, lengths: Ints, groups: Ints, valid: Bools) -> Floats:
        counted = valid & (lengths > 0)
        return _inverse(np.full(lengths.shape, float(lengths[counted].sum())), counted)


@dataclass(frozen=True, slots=True)
class Sequences(Aggregation):
    """1 / (B·length): equal weight for all tokens. `length` = 1 is PipelineRL's; Dr. GRPO uses L_max."""

    length: float | Length = 1.0

    @property
    def constant(self) -> float | Length:
        return self.length

    def problems(self) -> Iterator[str]:
        if not isinstance(self.length, Length) and self.length <= 0:
            yield f"agg.length must be positive, got {self.length}"

    @property
    def formula(self) -> str:
        if isinstance(self.length, Length):
            return "1/(B·L_max)"
        return "1/B" if self.length == 1.0 else f"1/(B·{self.length:g})"

    def token_weights(self, *, lengths: Ints, groups: Ints, valid: Bools) -> Floats:
        if isinstance(self.length, Length):
            raise UserError(
                f"agg.length is {self.length}, a recipe's sampling.max_tokens, which is unknown here; give max_tokens, "
                "or a number as agg.length"
            )
        counted = valid & (lengths > 0)
        return _inverse(np.full(lengths.shape, self.length * counted.sum()), counted)


KINDS: Final[Mapping[str, type[Aggregation]]] = {
    "trajectory": Trajectory,
    "group": Group,
    "batch": Batch,
    "sequences": Sequences,
}


def _totals(amounts: Floats, groups: Ints, counted: Bools) -> tuple[int, Floats]:
    """Return the number of groups with a `counted` rollout; and for each rollout, its group's sum of `amounts`, [B]."""
    _, index = np.unique(groups, return_inverse=True)
    sums = np.bincount(index, weights=amounts, minlength=1).astype(np.float64)
    return len(np.unique(index[counted])), sums[index]


def _inverse(denominators: Floats, counted: Bools) -> Floats:
    return np.divide(1.0, denominators, out=np.zeros(counted.shape), where=counted)
