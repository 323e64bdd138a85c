"""`Tokens`: what the slots of an objective read. Columns of one array library, with 0 outside the loss mask.

Blanking outside the mask happens here, once: whatever a prompt token's log-prob is, its ratios are 1, its divergences 0
and its gradient nothing, so a slot needs no thought for padding or prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Final, final

from pipelinerl.arrays import Array, namespace
from trainer_contract.types import Columns


class Policy(StrEnum):
    """Whose log-probs: see `behavior_logprobs` / `old_logprobs` / `logprobs` / `ref_logprobs` in the glossary."""

    CURRENT = "current"
    OLD = "old"
    BEHAVIOR = "behavior"
    REFERENCE = "reference"


_COLUMNS: Final = {Policy.OLD: "old_logprobs", Policy.REFERENCE: "ref_logprobs"}


def columns_of(*policies: Policy) -> frozenset[str]:
    """Optional columns of a micro-batch that hold the log-probs of `policies`."""
    return frozenset(_COLUMNS[policy] for policy in policies if policy in _COLUMNS)


@final
@dataclass(frozen=True, slots=True)
class Tokens:
    """Columns [T] of one micro-batch.

    Attributes:
        xp: the array library.
        mask: 1 where a token trains, else 0, in the dtype of the log-probs.
        logprobs: current, differentiable where the library differentiates.
        advantages, weights: of each token.
        logprobs_of: by policy; `logprobs` again under `Policy.CURRENT`.
        segment_ids, num_segments: for slots that speak of whole rollouts.
    """

    xp: ModuleType
    mask: Array
    logprobs: Array
    advantages: Array
    weights: Array
    logprobs_of: dict[Policy, Array]
    segment_ids: Array
    num_segments: int

    @classmethod
    def of(cls, logprobs: Array, columns: Columns) -> Tokens:
        """Blank what lies outside the mask. `columns` are named as the fields of `MicroBatch`."""
        xp, inside = namespace(logprobs), columns["loss_mask"]

        def blanked(column: Array) -> Array:
            return xp.where(inside, column, xp.zeros_like(column))

        current = blanked(logprobs)
        logprobs_of = {Policy.CURRENT: current, Policy.BEHAVIOR: blanked(columns["behavior_logprobs"])}
        for policy, name in _COLUMNS.items():
            if columns.get(name) is not None:
                logprobs_of[policy] = blanked(columns[name])
        return cls(
            xp=xp,
            mask=blanked(xp.ones_like(logprobs)),
            logprobs=current,
            advantages=blanked(columns["advantages"]),
            weights=blanked(columns["weights"]),
            logprobs_of=logprobs_of,
            segment_ids=columns["segment_ids"],
            num_segments=columns["num_segments"],
        )

    def log_ratio(self, numerator: Policy, denominator: Policy) -> Array:
        """log π_numerator − log π_denominator, [T]."""
        return self.logprobs_of[numerator] - self.logprobs_of[denominator]

    def ratio(self, numerator: Policy, denominator: Policy) -> Array:
        """π_numerator / π_denominator, [T]."""
        return self.xp.exp(self.log_ratio(numerator, denominator))
