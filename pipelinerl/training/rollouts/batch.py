"""Conversion of a step's groups to micro-batches: weights and advantages on the whole batch, then packing.

Advantages that depend only on rewards are computed before packing, so rollouts without gradient need not be packed.
Other advantages are computed after the forward passes, still on the whole batch:

    build ─▶ packed micro-batches ─▶ forward passes ─▶ `with_advantages` ─▶ `mini_batches` ─▶ backward of each

The first epoch trains on the same micro-batches as the forward passes. If forward and backward use the same
computation, π_θ/π_old therefore starts at exactly 1.

In shapes, B is the number of rollouts in the step, and N the number of their sampled tokens, concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple, Protocol, final, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from inference_contract.schemas import FinishReason
from pipelinerl import rng
from pipelinerl.enums import Truncated
from pipelinerl.objective.adv import Credit
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.reward import Parts, RewardShaping, Roles, Scored, TurnReward, Turns
from pipelinerl.objective.streams import ONE_LOSS, DomainLosses, Loss, with_constants
from pipelinerl.training.rollouts.admission import has_part_signal, has_signal, has_turn_signal, is_judged
from pipelinerl.training.rollouts.packing import (
    Packed,
    SegmentTable,
    Splitting,
    WeightedRollout,
    apart,
    bins_of,
    joined,
    pack,
    with_columns,
)
from pipelinerl.types import Outcome, Rollout, RolloutGroup
from trainer_contract.types import MicroBatch

Floats = NDArray[np.float64]
#: Function that assigns segments to micro-batches, given each segment's length, prompt and rollout.
Bins = Callable[[Sequence[int], Sequence[int], Sequence[int]], list[list[int]]]


@runtime_checkable
class TeachesCritic(Protocol):
    """Interface of an advantage estimator that also defines the critic's targets, such as `GAE`."""

    def returns(self, scored: Scored, columns: Mapping[str, Floats]) -> Floats:
        """Return the critic's targets [N]; the arguments are those of `Advantage.advantages`."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The data of one step, and its metrics.

    Attributes:
        learns: [B], True if the loss counts the rollout: it has a verdict and is not masked for being truncated.
        segments: the segments of all B rollouts.
        packed: micro-batches of the segments to compute; their `members` are indices into `segments`.
    """

    groups: list[RolloutGroup]
    scored: Scored
    learns: NDArray[np.bool_]
    partition: BatchPartition
    losses: DomainLosses
    segments: SegmentTable
    bins: Bins
    packed: list[Packed]
    stats: dict[str, float]

    @property
    def producing(self) -> int:
        """The version that the step produces."""
        return self.partition.producing

    @property
    def optimizer_steps(self) -> range:
        """The planned optimizer steps, numbered from 0 in the whole run as if no earlier batch had ended early."""
        planned = self.partition.mini_batching.updates
        return range((self.producing - 1) * planned, self.producing * planned)

    @property
    def orders(self) -> list[int]:
        """The indices of the controller's orders (requests) for the batch's groups, in the order of the groups."""
        return [group.index for group in self.groups]

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """The micro-batches as `build` packed them, without the columns of forward passes."""
        return [packed.micro_batch for packed in self.packed]

    def group_indices(self, number: int, segments: NDArray[np.integer] | None = None) -> list[int]:
        """Return the sorted indices (`RolloutGroup.index`) of the groups with segments in micro-batch `number`.

        If `segments` is given, only these segments of the micro-batch count.
        """
        rollouts = np.array(self.rollouts_of(number))[slice(None) if segments is None else segments]
        return sorted({self.groups[group].index for group in self.scored.groups[rollouts].tolist()})

    def rollouts_of(self, number: int) -> list[int]:
        """Return, for each segment of micro-batch `number`, the number of its rollout within the batch."""
        return [self.segments.owners[member] for member in self.packed[number].members]

    def domains_of(self, number: int) -> list[str]:
        """Return the domain of each segment of micro-batch `number`."""
        return [self.groups[self.scored.groups[rollout]].domain for rollout in self.rollouts_of(number)]

    def completed(self, micro_batches: Sequence[MicroBatch]) -> TrainBatch:
        """Return a copy of the batch with `micro_batches`, which have the columns from forward passes."""
        whole = [
            Packed(completed, packed.members) for completed, packed in zip(micro_batches, self.packed, strict=True)
        ]
        return replace(self, packed=whole)

    def mini_batches(self) -> Iterator[MiniBatch]:
        """Yield the mini-batch of each optimizer step, epoch after epoch; `packed` must have all forward columns."""
        computed: Mapping[int, MicroBatch] = {}
        for epoch in range(self.partition.mini_batching.epochs):
            for number, portion in enumerate(self.partition.portions(epoch)):
                if epoch == 0:
                    its = set(portion.members)
                    packed = [each for each in self.packed if self.segments.owners[each.members[0]] in its]
                else:
                    computed = computed or self._computed_segments()
                    packed = self._repacked(portion, computed)
                yield MiniBatch(epoch, number, replace(self, packed=packed))

    def _computed_segments(self) -> dict[int, MicroBatch]:
        return {
            member: segment
            for packed in self.packed
            for member, segment in zip(packed.members, apart(packed.micro_batch), strict=True)
        }

    def _repacked(self, portion: Portion, computed: Mapping[int, MicroBatch]) -> list[Packed]:
        numbers = [number for rollout in portion.members for number in self.segments.of_rollout(rollout)]
        owners = [self.segments.owners[number] for number in numbers]
        lengths = [computed[number].num_tokens for number in numbers]
        packed = []
        for places in self.bins(lengths, self.partition.groups[owners].tolist(), owners):
            its = [owners[place] for place in places]
            segments, weights = [computed[numbers[place]] for place in places], portion.token_weights[its].tolist()
            packed.append(
                Packed(joined(segments, token_weights=weights, owners=its), [numbers[place] for place in places])
            )
        return packed

    def with_advantages(self, objective: PolicyObjective, completed: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with advantages (and a critic's returns) computed from forward passes' columns."""
        adv = objective.adv
        columns = {name: self._gathered(completed, name) for name in objective.late_columns}
        advantages, streams = adv.advantages(self.scored, columns), self.partition.streams
        if streams is not None:
            advantages = with_constants(advantages, np.repeat(streams, self.scored.lengths))
        computed = {"advantages": advantages}
        computed |= objective.grad2.choices(self.scored, columns | computed)
        if isinstance(adv, TeachesCritic):
            computed["returns"] = adv.returns(self.scored, columns)
        return [
            with_columns(batch, {name: _scattered(column, batch, rows) for name, column in computed.items()})
            for batch, rows in zip(completed, self._rows(), strict=True)
        ]

    def _gathered(self, completed: Sequence[MicroBatch], name: str) -> Floats:
        column = np.zeros(self.scored.num_tokens)
        for batch, rows in zip(completed, self._rows(), strict=True):
            column[rows] = getattr(batch, name)[batch.loss_mask]
        return column

    def _rows(self) -> list[NDArray[np.intp]]:
        return [self.segments.rows(packed.members) for packed in self.packed]


class MiniBatch(NamedTuple):
    """The part of a batch for one optimizer step: epoch, number within the epoch (from 0), and packed rollouts."""

    epoch: int
    number: int
    batch: TrainBatch


def teacher(
    objective: PolicyObjective,
    shaping: Mapping[str, RewardShaping],
    truncated: Truncated,
    losses: DomainLosses = ONE_LOSS,
) -> Callable[[RolloutGroup], bool]:
    """Return a function that tells whether a group has a gradient.

    For this, its rewards must give a signal, and at least one rollout must have a verdict and not be masked.
    """
    signal = is_judged if learns_from_equals(objective, shaping) else signal_of(objective, losses)

    def teaches(group: RolloutGroup) -> bool:
        return signal(group) and any(
            rollout.verdict.outcome.is_judgement and not is_masked(rollout, truncated) for rollout in group.rollouts
        )

    return teaches


def signal_of(objective: PolicyObjective, losses: DomainLosses = ONE_LOSS) -> Callable[[RolloutGroup], bool]:
    """Return a function that tells whether a group's rewards (of rollouts, turns or reward terms) differ.

    The advantage estimator determines which rewards are compared. For a domain whose loss is not RL, the function
    always returns True.
    """
    differs = has_turn_signal if objective.adv.credit is Credit.TURNS else has_signal
    if objective.adv.needs_parts:
        differs = has_part_signal
    return lambda group: losses.of(group.domain) is not Loss.RL or differs(group)


def learns_from_equals(objective: PolicyObjective, shaping: Mapping[str, RewardShaping]) -> bool:
    """Return whether a group can have a gradient although all its verdicts are equal."""
    punished = any(how.overlong_tokens for how in shaping.values())
    if objective.late_columns or not objective.zero_advantage_is_idle or punished:
        return True
    ones = np.ones(4, np.intp)
    equals = Scored(
        rewards=np.array([1.0, 1.0, 0.0, 0.0]), groups=np.array([0, 0, 1, 1]), lengths=ones, valid=ones.astype(bool)
    )
    return bool(objective.adv.advantages(equals, {}).any())


def is_masked(rollout: Rollout, truncated: Truncated) -> bool:
    """Return whether the rollout is excluded from the loss because it ran out of tokens."""
    return truncated is Truncated.MASK and rollout.finish_reason == FinishReason.LENGTH


def _scattered(column: Floats, batch: MicroBatch, rows: NDArray[np.intp]) -> NDArray[np.float32]:
    whole = np.zeros(batch.num_tokens, np.float32)
    with np.errstate(over="ignore"):  # values that overflow fp32 become infinite, and `finite_check` reports them
        whole[batch.loss_mask] = column[rows]
    return whole


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatching:
    """The number of epochs over a batch, and of mini-batches (optimizer steps) in each.

    A batch ends before its next optimizer step if the KL from π_old exceeds `target_kl`, in nats per token. The random
    assignment of groups to mini-batches depends only on `seed`, version and epoch.
    """

    epochs: int = 1
    mini_batches: int = 1
    target_kl: float | None = None
    seed: int = 0

    @property
    def updates(self) -> int:
        """The number of optimizer steps of a batch that does not end early."""
        return self.epochs * self.mini_batches

    def dealt(self, sizes: Sequence[int], *, producing: int, epoch: int) -> list[list[int]]:
        """Return the groups of each mini-batch in `epoch` (from 0); `sizes` are the groups' tokens to compute."""
        count = max(1, min(self.mini_batches, sum(size > 0 for size in sizes)))
        draw = rng.generator(self.seed, "mini-batches", producing, epoch)
        return deal(sizes, count, draw)

    def exceeded(self, kl: float | None) -> bool:
        """Return whether the KL from π_old is too large for another optimizer step."""
        return self.target_kl is not None and kl is not None and kl > self.target_kl


#: The default mini-batching: one optimizer step per batch.
ONE_STEP = MiniBatching()


def build(
    groups: Sequence[RolloutGroup],
    *,
    objective: PolicyObjective,
    token_budget: int,
    producing: int,
    shaping: Mapping[str, RewardShaping] = MappingProxyType({}),
    truncated: Truncated = Truncated.TRAIN,
    width: int = 1,
    mini_batching: MiniBatching = ONE_STEP,
    losses: DomainLosses = ONE_LOSS,
    baselines: Mapping[str, float] = MappingProxyType({}),
) -> TrainBatch:
    """Weight and pack the rollouts of `groups` for the step that produces version `producing`.

    A rollout whose gradient is certainly 0 has weights but is not packed. If this holds for all rollouts, one of them
    is packed nevertheless.

    A truncated rollout that is masked still counts in its group's mean and deviation, as in DAPO, which masks only the
    loss; otherwise finishing an answer would not be rewarded. It does not count in the denominators of token weights.
    Advantages that need forward passes' columns exclude it, because it gets no forward pass.

    `shaping` and `losses` are given by domain, `baselines` by role; the trainer computes `width` micro-batches at once.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    verdicts = np.array([rollout.verdict.reward for rollout in rollouts], np.float64)
    lengths = np.array([rollout.num_sampled_tokens for rollout in rollouts])
    valid = np.array([rollout.verdict.outcome.is_judgement for rollout in rollouts]) & (lengths > 0)
    index = np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups])
    domains = np.array([group.domain for group in groups for _ in group.rollouts])
    with np.errstate(invalid="ignore"):
        rewards = _shaped(Scored(rewards=verdicts, groups=index, lengths=lengths, valid=valid), domains, shaping)
    learns = valid & ~np.array([is_masked(rollout, truncated) for rollout in rollouts])
    streams = losses.codes(domains.tolist())
    of_objective = valid if streams is None else valid & (streams == Loss.RL.code)
    late = bool(objective.late_columns)
    scored = Scored(
        rewards=rewards,
        groups=index,
        lengths=lengths,
        valid=learns & of_objective if late else of_objective,
        turns=_turns(rollouts) if objective.adv.credit is Credit.TURNS else None,
        parts=_parts(groups, shaping, rewards) if objective.adv.needs_parts else None,
        roles=Roles(_roles(groups), baselines) if objective.adv.state else None,
    )
    with np.errstate(invalid="ignore", over="ignore"):  # `finite_check` reports rewards that are not finite
        advantages = np.zeros(scored.num_tokens) if late else objective.adv.advantages(scored, {})
    advantages = advantages if streams is None else with_constants(advantages, np.repeat(streams, lengths))
    parts = np.split(advantages, np.cumsum(lengths)[:-1])
    taught = np.array([late or not objective.zero_advantage_is_idle or part.any() for part in parts]) | ~of_objective
    partition = BatchPartition(
        mini_batching=mini_batching,
        producing=producing,
        token_weights=lambda valid: losses.token_weights(
            objective.agg, domains.tolist(), lengths=lengths, groups=index, valid=valid
        ),
        streams=streams,
        groups=index,
        lengths=lengths,
        num_tokens=np.array([rollout.num_tokens for rollout in rollouts]),
        learns=learns,
        computed=_computed(learns & taught, learns if learns.any() else valid),
    )
    table = SegmentTable.of(rollouts)
    split = Splitting.NEVER if objective.reads_whole_rollouts else Splitting.WHERE_LARGE
    packing = partial(pack, token_budget=token_budget, width=width, split=split)
    return TrainBatch(
        groups=list(groups),
        scored=scored,
        learns=learns,
        partition=partition,
        losses=losses,
        segments=table,
        bins=partial(bins_of, token_budget=token_budget, width=width, split=split),
        packed=_packed(partition, table, parts, packing),
        stats=_stats(rollouts, rewards=verdicts[valid], partition=partition)
        | {"masked": float((valid & ~learns).mean())},
    )


def _turns(rollouts: Sequence[Rollout]) -> Turns:
    return Turns.of(
        [[TurnReward(len(turn.token_ids), turn.reward, turn.agent) for turn in one.turns] for one in rollouts]
    )


def _roles(groups: Sequence[RolloutGroup]) -> list[str]:
    return [
        f"{group.domain}/{turn.agent}" if turn.agent else group.domain
        for group in groups
        for rollout in group.rollouts
        for turn in rollout.turns
    ]


def _parts(groups: Sequence[RolloutGroup], shaping: Mapping[str, RewardShaping], rewards: Floats) -> Parts:
    ways = [(rollout, shaping.get(group.domain, RewardShaping())) for group in groups for rollout in group.rollouts]
    return Parts.of([how.parts(rollout.verdict.parts) for rollout, how in ways], rewards)


def _computed(teaches: NDArray[np.bool_], some: NDArray[np.bool_]) -> list[int]:
    """Return the indices of rollouts to compute: those in mask `teaches` or, if it is empty, the first in `some`."""
    return np.flatnonzero(teaches if teaches.any() else some & (np.cumsum(some) == 1)).tolist()


def _packed(
    partition: BatchPartition,
    table: SegmentTable,
    advantages: Sequence[Floats],
    packing: Callable[[Sequence[WeightedRollout]], list[Packed]],
) -> list[Packed]:
    packed = []
    for members, weights in partition.portions(0):
        weighted = [
            WeightedRollout(
                rollout=table.rollouts[i],
                advantages=advantages[i],
                token_weight=float(weights[i]),
                stream=None if partition.streams is None else int(partition.streams[i]),
            )
            for i in members
        ]
        numbers = [number for i in members for number in table.of_rollout(i)]
        packed += [Packed(batch, [numbers[place] for place in places]) for batch, places in packing(weighted)]
    return packed


def _shaped(scored: Scored, domains: NDArray[np.str_], shaping: Mapping[str, RewardShaping]) -> Floats:
    rewards = scored.rewards.copy()
    for domain, how in shaping.items():
        its = domains == domain
        if its.any():
            rewards[its] = how.apply(
                rewards=rewards[its], groups=scored.groups[its], lengths=scored.lengths[its], valid=scored.valid[its]
            )
    return rewards


def _stats(rollouts: Sequence[Rollout], *, rewards: np.ndarray, partition: BatchPartition) -> dict[str, float]:
    lengths = partition.lengths
    staleness = np.array([partition.producing - rollout.oldest_version for rollout in rollouts])
    mixed = np.array([rollout.oldest_version != rollout.newest_version for rollout in rollouts])
    right = sum(rollout.verdict.outcome is Outcome.CORRECT for rollout in rollouts)
    return {
        "rollouts": float(len(rollouts)),
        "reward": float(rewards.mean()) if rewards.size else 0.0,
        "accuracy": right / max(1, rewards.size),
        "tokens": float(sum(rollout.num_tokens for rollout in rollouts)),
        "sampled_tokens": float(lengths.sum()),
        "length_mean": float(lengths.mean()),
        "length_p95": float(np.percentile(lengths, 95)),
        "length_max": float(lengths.max()),
        "truncated": float(np.mean([rollout.finish_reason == FinishReason.LENGTH for rollout in rollouts])),
        "staleness_mean": float(staleness.mean()),
        "staleness_max": float(staleness.max()),
        "mixed_version_fraction": float(mixed.mean()),
        "unjudged": float(len(rollouts) - rewards.size),
        "idle_fraction": 1 - len(partition.computed) / len(rollouts),
    }


def deal(sizes: Sequence[int], count: int, draw: np.random.Generator) -> list[list[int]]:
    """Distribute groups at random to `count` mini-batches; their numbers of groups differ by at most one.

    Each round takes the `count` largest remaining groups and gives one to each mini-batch. The sizes of mini-batches
    thus differ by at most the largest group. A mini-batch of few long groups is avoided, because each of these groups
    would have too much weight.
    """
    order = sorted(draw.permutation(len(sizes)).tolist(), key=lambda group: -sizes[group])
    parts: list[list[int]] = [[] for _ in range(count)]
    for first in range(0, len(order), count):
        for group, part in zip(order[first : first + count], draw.permutation(count).tolist(), strict=False):
            parts[part].append(group)
    return [sorted(part) for part in parts]


class Portion(NamedTuple):
    """One mini-batch: the indices of its rollouts to compute, and token weights [B], 0 for rollouts outside it."""

    members: list[int]
    token_weights: NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPartition:
    """The facts about a batch of B rollouts that determine its mini-batches.

    Attributes:
        producing: the version that the batch produces.
        token_weights: function from a mask [B], the rollouts of a mini-batch, to the weight [B] of each one's tokens.
        streams: [B], each rollout's loss (`Loss.code`); None if all have the run's objective.
        groups, lengths, num_tokens: [B], each rollout's group, number of sampled tokens, and number of all tokens.
        learns: [B], True if the loss counts the rollout, as in `TrainBatch`.
        computed: indices of the rollouts that can have a gradient; if none can, of one rollout.
    """

    mini_batching: MiniBatching
    producing: int
    token_weights: Callable[[NDArray[np.bool_]], Floats]
    streams: NDArray[np.int32] | None
    groups: NDArray[np.intp]
    lengths: NDArray[np.intp]
    num_tokens: NDArray[np.intp]
    learns: NDArray[np.bool_]
    computed: list[int]

    def portions(self, epoch: int) -> list[Portion]:
        """Return the mini-batches of `epoch` (counted from 0) in the order of training."""
        work = np.zeros(len(self.groups), np.intp)
        work[self.computed] = self.num_tokens[self.computed]
        sizes = np.bincount(self.groups, weights=work).astype(int).tolist()
        portions = []
        for part in self.mini_batching.dealt(sizes, producing=self.producing, epoch=epoch):
            inside = np.isin(self.groups, part)
            weights = self.token_weights(self.learns & inside)
            portions.append(Portion([i for i in self.computed if inside[i]], weights))
        return portions
