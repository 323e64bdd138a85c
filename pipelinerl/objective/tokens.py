"""`Tokens`: what the slots of an objective read: columns of one array library, as nothing outside the loss mask.

A log-ratio is 0 and a log-prob is 0 outside the mask, whatever the columns hold there, so a slot needs no thought for
padding or prompts. Advantages and weights are 0 there by the contract. A column is read, and blanked, when a slot asks
for it and not before.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Final, final

from pipelinerl.arrays import Array, namespace, segment_sum
from trainer_contract.types import Columns


class Policy(StrEnum):
    """Whose log-probs: see `behavior_logprobs` / `old_logprobs` / `logprobs` / `ref_logprobs` in the glossary."""

    CURRENT = "current"
    OLD = "old"
    BEHAVIOR = "behavior"
    REFERENCE = "reference"


_COLUMNS: Final = {
    Policy.OLD: "old_logprobs",
    Policy.BEHAVIOR: "behavior_logprobs",
    Policy.REFERENCE: "ref_logprobs",
}

SYMBOLS: Final = {Policy.CURRENT: "π_θ", Policy.OLD: "π_old", Policy.BEHAVIOR: "μ", Policy.REFERENCE: "π_ref"}
"""How formulas write a policy."""


def columns_of(*policies: Policy) -> frozenset[str]:
    """Optional columns of a micro-batch that hold the log-probs of `policies`; the sampler's are always there."""
    return frozenset(_COLUMNS[policy] for policy in policies if policy in (Policy.OLD, Policy.REFERENCE))


@final
@dataclass(frozen=True, slots=True)
class Tokens:
    """Columns [T] of one micro-batch.

    Attributes:
        xp: the array library.
        inside: bool, where a token trains.
        current: log-probs, differentiable where the library differentiates; anything outside the mask.
        columns: named as the fields of `MicroBatch`.
    """

    xp: ModuleType
    inside: Array
    current: Array
    columns: Columns

    @classmethod
    def of(cls, logprobs: Array, columns: Columns) -> Tokens:
        """Of current log-probs and the columns of a micro-batch, in one array library."""
        return cls(namespace(logprobs), columns["loss_mask"], logprobs, columns)

    @property
    def logprobs(self) -> Array:
        """Current log-probs, 0 outside the mask."""
        return self.blanked(self.current)

    @property
    def advantages(self) -> Array:
        """Of each token; 0 outside the mask."""
        return self.columns["advantages"]

    @property
    def weights(self) -> Array:
        """The aggregation's, of each token; 0 outside the mask."""
        return self.columns["weights"]

    @property
    def mask(self) -> Array:
        """1 where a token trains, else 0, in the dtype of the log-probs."""
        return self.blanked(self.xp.ones_like(self.current))

    def blanked(self, column: Array) -> Array:
        """The column, 0 outside the mask."""
        return self.xp.where(self.inside, column, 0.0)

    def log_ratio(self, numerator: Policy, denominator: Policy) -> Array:
        """log π_numerator − log π_denominator, [T]; 0 outside the mask."""
        return self.blanked(self._of(numerator) - self._of(denominator))

    def ratio(self, numerator: Policy, denominator: Policy) -> Array:
        """π_numerator / π_denominator, [T]; 1 outside the mask."""
        return self.xp.exp(self.log_ratio(numerator, denominator))

    def segment_total(self, amounts: Array) -> Array:
        """Σ of `amounts` [T] over the token's own rollout, which no micro-batch splits, [T]."""
        segment_ids = self.columns["segment_ids"]
        return segment_sum(amounts, segment_ids, self.columns["num_segments"])[segment_ids]

    def segment_mean(self, amounts: Array) -> Array:
        """Mean of `amounts` [T], which are 0 outside the mask, over the sampled tokens of the token's rollout, [T]."""
        return self.segment_total(amounts) / self.segment_length()

    def segment_length(self) -> Array:
        """|o_i|: sampled tokens of the token's rollout, at least 1, [T]."""
        return self.xp.clip(self.segment_total(self.mask), 1.0, None)

    def _of(self, policy: Policy) -> Array:
        return self.current if policy is Policy.CURRENT else self.columns[_COLUMNS[policy]]
