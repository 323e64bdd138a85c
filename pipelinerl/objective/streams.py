"""Streams: a batch whose tokens have different losses is divided into one stream per loss; the losses are added up.

    loss = Σ_s loss_s(tokens of stream s)

Each stream has its own objective and its own denominator, so one stream does not change the gradients of another. The
column `streams` of a micro-batch holds the number of each token's stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipelinerl.arrays import Array
from pipelinerl.objective.agg import Aggregation
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.presets import resolve
from pipelinerl.objective.reward import Bools, Ints
from pipelinerl.objective.tokens import column_of
from trainer_contract.types import Columns, HeadMeasure, MicroBatch


class Loss(StrEnum):
    """The kind of loss that the tokens of a domain have."""

    RL = "rl"
    """The run's objective."""
    CE = "ce"
    """Cross-entropy: the mean of −log π_θ over the tokens of reference answers from the data."""
    REF_KL = "ref_kl"
    """Reverse KL to a teacher on the policy's own answers (`on_policy_distillation`); rewards are ignored."""

    @property
    def code(self) -> int:
        return _CODES[self]


_CODES: Final = {loss: code for code, loss in enumerate(Loss)}

#: Cross-entropy, written as an objective of five slots.
CROSS_ENTROPY: Final = resolve(
    {"agg": "batch", "is_weight": "one", "adv": "constant", "grad1": "logprob", "grad2": "none"}
)
_OWN: Final[Mapping[Loss, PolicyObjective]] = {
    Loss.CE: CROSS_ENTROPY,
    Loss.REF_KL: resolve("on_policy_distillation"),
}
#: The constant advantage of the tokens in each stream, indexed by `Loss.code`; NaN for RL, whose advantages vary.
_ADVANTAGES: Final = np.array([np.nan, 1.0, 0.0])


@dataclass(frozen=True, slots=True)
class StreamedObjective:
    """The sum of one objective per stream: `rl`, the run's objective, and those of the streams in `others`."""

    rl: PolicyObjective
    others: tuple[Loss, ...]

    @property
    def parts(self) -> dict[Loss, PolicyObjective]:
        """The objective of each stream; the run's objective is the first."""
        return {Loss.RL: self.rl, **{loss: _OWN[loss] for loss in self.others}}

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"streams"}).union(*(part.needs for part in self.parts.values()))

    def evaluate(self, logprobs: Array, columns: Columns) -> Array:
        first, *others = (part.evaluate(logprobs, within(columns, loss)) for loss, part in self.parts.items())
        return sum(others, first)

    def prediction_gradient(self, logprobs: Array, columns: Columns) -> Array:
        parts = self.parts.items()
        first, *others = (part.prediction_gradient(logprobs, within(columns, loss)) for loss, part in parts)
        return sum(others, first)

    def measure_gradients(self, logprobs: Array, columns: Columns) -> Mapping[HeadMeasure, Array]:
        return self.rl.measure_gradients(logprobs, within(columns, Loss.RL))


def within(columns: Columns, loss: Loss) -> Columns:
    """Return the columns with the loss mask of one stream; `kl_coefficients` belong to the run's objective alone."""
    its = {**columns, "loss_mask": columns["loss_mask"] & (column_of(columns, "streams") == loss.code)}
    if loss is not Loss.RL:
        its.pop("kl_coefficients", None)
    return its


def only(batch: MicroBatch, loss: Loss) -> MicroBatch:
    """Return the micro-batch with the loss mask reduced to the tokens of one stream."""
    if batch.streams is None:
        return batch if loss is Loss.RL else replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
    return replace(batch, loss_mask=batch.loss_mask & (batch.streams == loss.code))


class DomainLoss(NamedTuple):
    """The kind of loss of a domain, and a factor that multiplies its token weights."""

    loss: Loss = Loss.RL
    factor: float = 1.0


_OF_OTHERS: Final = DomainLoss()


@dataclass(frozen=True, slots=True)
class DomainLosses:
    """The kind of loss of each domain that a step may contain; no entries if all domains have the run's objective."""

    by_domain: Mapping[str, DomainLoss] = field(default_factory=dict)

    def of(self, domain: str) -> Loss:
        return self.by_domain.get(domain, _OF_OTHERS).loss

    @property
    def others(self) -> tuple[Loss, ...]:
        """The kinds of loss other than RL that the domains have, in the order of their codes."""
        return tuple(loss for loss in _OWN if any(each.loss is loss for each in self.by_domain.values()))

    def objective(self, rl: PolicyObjective) -> PolicyObjective | StreamedObjective:
        """Return the sum of the run's objective `rl` and the objectives of all other streams."""
        return StreamedObjective(rl, self.others) if self.others else rl

    @property
    def passes(self) -> frozenset[str]:
        return frozenset().union(*(_OWN[loss].passes for loss in self.others))

    def codes(self, domains: Sequence[str]) -> NDArray[np.int32] | None:
        """Return the number of the stream of each domain in `domains`; None if all have the run's objective."""
        return np.array([self.of(domain).code for domain in domains], np.int32) if self.others else None

    def factors(self, domains: Sequence[str]) -> NDArray[np.float64]:
        return np.array([self.by_domain.get(domain, _OF_OTHERS).factor for domain in domains])

    def token_weights(
        self, agg: Aggregation, domains: Sequence[str], *, lengths: Ints, groups: Ints, valid: Bools
    ) -> NDArray[np.float64]:
        """Return each rollout's token weight [B]: normalised within its stream by `agg`, times its domain's factor."""
        codes = self.codes(domains)
        if codes is None:
            return agg.token_weights(lengths=lengths, groups=groups, valid=valid) * self.factors(domains)
        rules = {Loss.RL: agg, **{loss: _OWN[loss].agg for loss in self.others}}
        weights = [
            rule.token_weights(lengths=lengths, groups=groups, valid=valid & (codes == loss.code))
            for loss, rule in rules.items()
        ]
        return np.sum(weights, axis=0) * self.factors(domains)


#: The losses of a run in which all domains have the run's objective.
ONE_LOSS: Final = DomainLosses()


def with_constants(advantages: NDArray[np.float64], codes: NDArray[np.int32]) -> NDArray[np.float64]:
    """Replace advantages [N] outside the RL stream by 1 (cross-entropy) or 0 (reverse KL); `codes` is [N]."""
    return np.where(codes == Loss.RL.code, advantages, _ADVANTAGES[codes])
