"""`Tokens`: the columns that an objective's terms (slots) read, in one array library, 0 outside the loss mask.

Outside the mask, the original columns may hold NaN or infinity; slots never see these values. A column is masked only
when a slot reads it. A missing column raises `ColumnError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import ModuleType
from typing import Any, Final

from pipelinerl.arrays import Array, namespace, segment_sum, stop_gradient
from pipelinerl.errors import ColumnError
from trainer_contract.types import Columns, HeadMeasure

#: κ of truncated and clipped ratios: how much longer a run learns for each unit of 1 / ESS − 1 that lag causes. Fits
#: to runs of the `tiny` recipe gave 1.1 to 4.0.
LAG_LOSS: Final = 3.0


class Policy(StrEnum):
    """One of the policies whose log-probs an objective can use."""

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
"""Symbol of each policy in formulas."""


_HEAD: Final = "the trainer's output layer, from the logits that it has"

COMPUTED_BY: Final[Mapping[str, str]] = {
    "behavior_logprobs": "the sampler, as it samples",
    "old_logprobs": "a forward pass of the trainer before the step; training.old_logprobs says at which weights",
    "ref_logprobs": "a forward pass of a frozen reference",
    "values": "a forward pass of a critic",
    "returns": "the advantage estimator gae, from values",
    "advantages": "the slot adv, on the whole batch",
    "weights": "the slot agg, on the whole batch",
    "loss_mask": "packing",
    "segment_ids": "packing",
    "rollout_ids": "packing",
    "streams": "packing",
    "kl_coefficients": "the training step, on the whole batch",
    "num_segments": "packing",
    **{str(measure): _HEAD for measure in HeadMeasure},
}
"""The component that computes each column, for error messages."""


def column_of(columns: Mapping[str, Any], name: str) -> Any:
    """Return a column. Raises ColumnError if it is missing; the message says which component computes it."""
    column = columns.get(name)
    if column is None:
        present = ", ".join(sorted(key for key, value in columns.items() if value is not None)) or "none"
        raise ColumnError(
            f"the objective reads the column {name}, which is not among those given ({present}); it is computed by "
            f"{COMPUTED_BY[name]}: give it, or take slots that do not read it"
        )
    return column


def columns_of(*policies: Policy) -> frozenset[str]:
    """Return the optional columns with log-probs of `policies`; behavior log-probs are never optional."""
    return frozenset(_COLUMNS[policy] for policy in policies if policy in (Policy.OLD, Policy.REFERENCE))


@dataclass(frozen=True, slots=True)
class Tokens:
    """Columns [T] of one micro-batch.

    Attributes:
        xp: the array library.
        inside: bool, the loss mask.
        current: the current policy's log-probs, differentiable if the library differentiates; any value outside the
            mask.
        columns: arrays by the names of the fields of `MicroBatch`.
        live: bool, False where the term to compute will be multiplied by 0 (`counting`). `exp` uses the exponent 0 at
            these tokens, to avoid overflow. None means True everywhere.
    """

    xp: ModuleType
    inside: Array
    current: Array
    columns: Columns
    live: Array | None = None

    @classmethod
    def of(cls, logprobs: Array, columns: Columns) -> Tokens:
        return cls(namespace(logprobs), column_of(columns, "loss_mask"), logprobs, columns)

    def counting(self, factors: Array) -> Tokens:
        """Return a copy for a term to be multiplied by `factors` [T]; where one is 0, the product is 0, not NaN."""
        return replace(self, live=factors != 0)

    @property
    def logprobs(self) -> Array:
        return self.blanked(self.current)

    @property
    def advantages(self) -> Array:
        return self.column("advantages")

    @property
    def weights(self) -> Array:
        return self.column("weights")

    @property
    def mask(self) -> Array:
        return self.blanked(self.xp.ones_like(self.current))

    def blanked(self, column: Array) -> Array:
        return self.xp.where(self.inside, column, 0.0)

    def column(self, name: str) -> Array:
        """Return the column of that name, 0 outside the mask. Raises ColumnError if it is missing."""
        return self.blanked(column_of(self.columns, name))

    def exp(self, amounts: Array) -> Array:
        """Return e^amounts, [T]; 1 where `live` is False."""
        return self.xp.exp(self._counted(amounts))

    def expm1(self, amounts: Array) -> Array:
        """Return e^amounts − 1, [T]; 0 where `live` is False."""
        return self.xp.expm1(self._counted(amounts))

    def log_ratio(self, numerator: Policy, denominator: Policy) -> Array:
        """Return log π_numerator − log π_denominator, [T]; 0 outside the mask."""
        return self._of(numerator) - self._of(denominator)

    def ratio(self, numerator: Policy, denominator: Policy) -> Array:
        """Return π_numerator / π_denominator, [T]; 1 outside the mask."""
        return self.exp(self.log_ratio(numerator, denominator))

    def probability(self, policy: Policy) -> Array:
        """Return the probability of each sampled token under `policy`, [T], without gradient; 1 outside the mask."""
        return self.xp.exp(stop_gradient(self._of(policy)))

    def rollout_total(self, amounts: Array) -> Array:
        """Return for each token the sum of `amounts` over its rollout, [T]; without `rollout_ids`, over its segment."""
        rollout_ids = self.columns.get("rollout_ids")
        if rollout_ids is None:
            rollout_ids = column_of(self.columns, "segment_ids")
        return segment_sum(amounts, rollout_ids, column_of(self.columns, "num_segments"))[rollout_ids]

    def rollout_mean(self, amounts: Array) -> Array:
        """Return each token's mean of `amounts`, which are 0 outside the mask, over its rollout, [T]."""
        lengths = self.rollout_total(self.mask)
        return self.rollout_total(amounts) / self.xp.clip(lengths, 1.0, None)

    def _of(self, policy: Policy) -> Array:
        return self.logprobs if policy is Policy.CURRENT else self.column(_COLUMNS[policy])

    def _counted(self, amounts: Array) -> Array:
        return amounts if self.live is None else self.xp.where(self.live, amounts, 0.0)
