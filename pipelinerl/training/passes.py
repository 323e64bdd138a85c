"""The passes around a step: forward passes before it, and the measurement of the policy's exact entropy.

Each forward pass computes a column, one value per token, if an objective or meter needs it:

    old_logprobs   the policy, at the weights that sampled each token or at those from which the step starts; or the
                   sampler's own log-probs, as the recipe chooses
    ref_logprobs   the reference: a worker with the run's initial weights, which never steps; or a domain's teacher
    values         the critic, before it learns from this step

The recorded experts of a mixture of experts are replayed only in the policy's passes; reference and critic are other
models, which choose their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, zip_longest
from typing import Final, Protocol

import numpy as np

from pipelinerl.enums import OldLogprobs
from pipelinerl.numerics.entropy_probe import EntropyProbe
from pipelinerl.objective.streams import Loss
from pipelinerl.training.batch import TrainBatch, naming
from pipelinerl.training.packing import SegmentTable, alone, prefixes
from pipelinerl.training.weight_history import WeightHistory
from trainer_contract.errors import NonFiniteError
from trainer_contract.trainer import Trainer
from trainer_contract.types import Bool, Float32, MicroBatch


class Teacher(Protocol):
    """A frozen model that computes log-probs: a trainer that never steps, or an engine."""

    def forward(self, micro_batches: Sequence[MicroBatch]) -> list[Float32]:
        """Return the log-probs f32 [T] of each micro-batch's tokens at their temperatures; 0 at segment starts."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardPasses:
    """The workers that compute columns (values per token); recipes that need a missing worker are rejected earlier.

    `teachers` maps domains to their teachers if these are other models than the reference. `history` has the weights
    that sampled, if `old_logprobs` are computed with these weights.
    """

    policy: Trainer
    critic: Trainer | None = None
    reference: Teacher | None = None
    teachers: Mapping[str, Teacher] = field(default_factory=dict)
    old_logprobs: OldLogprobs = OldLogprobs.RECOMPUTE
    history: WeightHistory | None = None

    def completed(self, batch: TrainBatch, needs: AbstractSet[str]) -> TrainBatch:
        """Return the batch with the columns `needs`, as far as the workers exist. Raises NonFiniteStep."""
        passes: dict[str, Callable[[TrainBatch], list[Float32]]] = {"old_logprobs": self._old_logprobs}
        if batch.rules.losses.others:
            passes["ref_logprobs"] = self._by_domain
        elif (reference := self.reference) is not None:
            passes["ref_logprobs"] = lambda batch: reference.forward(unrouted(batch.micro_batches))
        if (critic := self.critic) is not None:
            passes["values"] = lambda batch: critic.forward(unrouted(batch.micro_batches))
        for name, compute in passes.items():
            if name in needs:
                with naming(name, batch.orders):
                    batch = batch.with_columns({name: compute(batch)})
        return batch

    def _old_logprobs(self, batch: TrainBatch) -> list[Float32]:
        """Return log-probs [T] of the old policy; at the weights that sampled each token, with one pass per version."""
        batches = batch.micro_batches
        if self.old_logprobs is OldLogprobs.BEHAVIOR:
            return [each.behavior_logprobs for each in batches]
        if self.old_logprobs is OldLogprobs.RECOMPUTE:
            return self.policy.forward(batches)
        assert self.history is not None, "old_logprobs at the sampling weights need a history of them"
        columns = [np.zeros(each.num_tokens, np.float32) for each in batches]
        versions = [each.behavior_versions for each in batches if each.behavior_versions is not None]
        masks = [each.loss_mask for each in batches]
        sampled = np.concatenate([its[mask] for its, mask in zip(versions, masks, strict=True)])
        for version in np.unique(sampled).tolist():
            tokens = [mask & (its == version) for its, mask in zip(versions, masks, strict=True)]
            _fill(columns, batches, tokens, partial(self.policy.forward_at, weights=self.history.weights(version)))
        return columns

    def _by_domain(self, batch: TrainBatch) -> list[Float32]:
        """Return log-probs [T] under each domain's reference or teacher; 0 for domains without one."""
        losses, refers = batch.rules.losses, "ref_logprobs" in batch.objective.passes
        taught: dict[int, tuple[Teacher, set[str]]] = {}
        for domain in {group.domain for group in batch.groups}:
            own = self.teachers.get(domain, self.reference) if losses.of(domain) is Loss.REF_KL else None
            teacher = self.reference if refers and losses.of(domain) is Loss.RL else own
            if teacher is not None:
                taught.setdefault(id(teacher), (teacher, set()))[1].add(domain)
        batches = batch.micro_batches
        columns = [np.zeros(each.num_tokens, np.float32) for each in batches]
        by_group = [batch.scored.groups[batch.rollouts_of(number)] for number in range(len(batches))]
        for teacher, names in taught.values():
            is_taught = np.array([group.domain in names for group in batch.groups])
            its = [is_taught[groups] for groups in by_group]
            tokens = [each.loss_mask & mask[each.segment_ids] for each, mask in zip(batches, its, strict=True)]
            _fill(columns, unrouted(batches), tokens, teacher.forward)
        return columns


def _fill(
    columns: Sequence[Float32],
    batches: Sequence[MicroBatch],
    tokens: Sequence[Bool],
    forward: Callable[[list[MicroBatch]], list[Float32]],
) -> None:
    """Write log-probs into the columns where `tokens` are true; `forward` gets segments up to their last such token."""
    touched = [number for number, its in enumerate(tokens) if its.any()]
    parts = [prefixes(batches[number], through=tokens[number]) for number in touched]
    computed_logprobs = forward([micro_batch for micro_batch, _ in parts]) if parts else []
    for number, (_, kept), logprobs in zip(touched, parts, computed_logprobs, strict=True):
        its: Bool = tokens[number]
        columns[number][its] = logprobs[its[kept]]


def unrouted(batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Return the micro-batches without recorded experts, for models other than the one that sampled."""
    return [replace(batch, routed_experts=None) for batch in batches]


#: The exact entropy is measured on one in this many rollouts.
_ONE_IN: Final = 16
#: Name of the entropy metric.
EXACT_ENTROPY: Final = "exact_entropy"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredEntropy:
    """The policy's entropy, measured in one step; both fields are {} if it was not measured.

    `figures` has the metric, in mean nats per sampled token. `of_tokens` maps a rollout's number to the entropies of
    its sampled tokens, f32 [N]; {} if only the mean is known.
    """

    figures: dict[str, float] = field(default_factory=dict)
    of_tokens: Mapping[int, Float32] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EntropyMeter:
    """Measures exact entropy every `interval_steps` (0: never), first of the `logged_groups` by `seed`."""

    interval_steps: int = 0
    seed: int = 0
    logged_groups: int = 0

    def measure(self, policy: Trainer, batch: TrainBatch) -> MeasuredEntropy:
        """Measure the entropy by a backward pass whose gradient, and any accumulated before, is discarded."""
        if self.interval_steps == 0 or batch.producing % self.interval_steps:
            return MeasuredEntropy()
        # Up to half of the measured rollouts are from groups in the sample log, the others are evenly spaced.
        members = sorted({row for number in range(len(batch.packed)) for row in batch.rollouts_of(number)})
        count = -(-len(members) // _ONE_IN)
        logged = [
            [row for row in members if batch.scored.groups[row] == number]
            for number in batch.drawn(self.seed, self.logged_groups)
        ]
        in_turn = (row for row in chain.from_iterable(zip_longest(*logged)) if row is not None)
        first = list(islice(in_turn, (count + 1) // 2))
        others = [member for member in members if member not in first]
        spaced = others[:: -(-len(others) // (count - len(first)))] if count > len(first) else []
        chosen, probe = sorted(first + spaced), EntropyProbe()
        rollouts = [batch.segments.rollouts[row] for row in chosen]
        try:
            (measured,) = policy.backward([alone(rollouts)], probe)
        except NonFiniteError:  # the step itself will find the cause and report it
            return MeasuredEntropy()
        finally:
            policy.discard_gradient()
        lengths, seen = [rollout.num_sampled_tokens for rollout in rollouts], probe.seen
        figures = {EXACT_ENTROPY: measured.loss}
        if len(seen) != 1 or len(seen[0]) != sum(lengths):
            return MeasuredEntropy(figures=figures)
        table, entropies = SegmentTable.of(rollouts), np.empty_like(seen[0])
        entropies[table.rows(range(len(table.owners)))] = seen[0]
        by_rollout = np.split(entropies, np.cumsum(lengths)[:-1])
        return MeasuredEntropy(figures=figures, of_tokens=dict(zip(chosen, by_rollout, strict=True)))
