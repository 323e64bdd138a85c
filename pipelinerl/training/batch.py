"""A step's batch: token weights and advantages on whole groups, then packing into micro-batches.

    build ─▶ packed micro-batches ─▶ forward passes ─▶ `with_advantages` ─▶ `mini_batches` ─▶ backward of each

Advantages that depend only on rewards are computed before packing, so rollouts without gradient need not be packed.
Other advantages are computed after the forward passes, still on the whole batch. The first epoch trains on the same
micro-batches as the forward passes. If forward and backward use the same computation, π_θ/π_old therefore starts at
exactly 1.

A step whose loss, gradient or log-probs are not finite raises `NonFiniteStep` and is skipped. To find the cause,
columns are checked first, then each term of the objective with the step's log-probs. If all these are finite, the cause
is the model.

In shapes, B is the number of rollouts in the step, and N the number of their sampled tokens, concatenated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import fmean
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from inference_contract.schemas import FinishReason
from pipelinerl import rng
from pipelinerl.enums import Truncated
from pipelinerl.errors import PipelineError
from pipelinerl.objective.adv import GAE, Credit
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.reward import Parts, RewardShaping, Roles, Scored, TurnReward, Turns
from pipelinerl.objective.streams import ONE_LOSS, DomainLosses, Loss, with_constants
from pipelinerl.objective.tokens import Tokens
from pipelinerl.training.packing import Packed, SegmentTable, WeightedRollout, apart, bins_of, joined, pack
from pipelinerl.types import Outcome, Rollout, RolloutGroup
from trainer_contract.errors import NonFiniteError
from trainer_contract.types import Bool, Float32, MicroBatch

Floats = NDArray[np.float64]

#: The checked columns, in order of computation; the first one that is not finite is the cause.
_COLUMNS: Final = (
    "behavior_logprobs", "weights", "old_logprobs", "ref_logprobs", "values", "advantages", "returns"
)  # fmt: skip


class NonFiniteStep(PipelineError):
    """A step must be skipped: `what` (a column, term or metric) is not finite in the groups with indices `groups`."""

    def __init__(self, what: str, groups: list[int]) -> None:
        super().__init__(f"{what} of group{'s' * (len(groups) != 1)} {', '.join(map(str, groups))}")
        self.what = what
        self.groups = groups


@contextmanager
def naming(what: str, groups: list[int]) -> Iterator[None]:
    """Convert a `NonFiniteError` of the block to a `NonFiniteStep` with `what` and the group indices `groups`."""
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteStep(what, groups) from error


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
        return self.epochs * self.mini_batches

    def dealt(self, sizes: Sequence[int], *, producing: int, epoch: int) -> list[list[int]]:
        """Return the groups of each mini-batch in `epoch` (from 0); `sizes` are the groups' tokens to compute."""
        count = max(1, min(self.mini_batches, sum(size > 0 for size in sizes)))
        return deal(sizes, count, rng.generator(self.seed, "mini-batches", producing, epoch))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRules:
    """A run's rules for batches of up to `token_budget` tokens, `width` at once; `shaping`, `losses` by domain."""

    token_budget: int
    width: int = 1
    shaping: Mapping[str, RewardShaping] = field(default_factory=dict)
    truncated: Truncated = Truncated.TRAIN
    losses: DomainLosses = ONE_LOSS
    mini_batching: MiniBatching = MiniBatching()

    def masks(self, rollout: Rollout) -> bool:
        """Return whether the loss excludes the rollout for being truncated."""
        return self.truncated is Truncated.MASK and rollout.finish_reason == FinishReason.LENGTH


def build(
    groups: Sequence[RolloutGroup],
    rules: BatchRules,
    *,
    objective: PolicyObjective,
    producing: int,
    baselines: Mapping[str, float] = MappingProxyType({}),
) -> TrainBatch:
    """Weight and pack the rollouts of `groups` for the step that produces version `producing`.

    `baselines` are the current average rewards by role. A rollout whose gradient is certainly 0 has weights but is not
    packed. If this holds for all rollouts, one of them is packed nevertheless.

    A truncated rollout that is masked still counts in its group's mean and deviation, as in DAPO, which masks only the
    loss; otherwise finishing an answer would not be rewarded. It does not count in the denominators of token weights.
    Advantages that need forward passes' columns exclude it, because it gets no forward pass.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    domains = [group.domain for group in groups for _ in group.rollouts]
    lengths = np.array([rollout.num_sampled_tokens for rollout in rollouts])
    valid = np.array([rollout.verdict.outcome.is_judgement for rollout in rollouts]) & (lengths > 0)
    learns = valid & ~np.array([rules.masks(rollout) for rollout in rollouts])
    streams = rules.losses.codes(domains)
    rewarded = valid if streams is None else valid & (streams == Loss.RL.code)
    late = bool(objective.late_columns)
    given = Scored(
        rewards=np.array([rollout.verdict.reward for rollout in rollouts], np.float64),
        groups=np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups]),
        lengths=lengths,
        valid=valid,
    )
    rewards, domain_of = given.rewards.copy(), np.array(domains)
    with np.errstate(invalid="ignore"):
        for domain, how in rules.shaping.items():
            if (its := domain_of == domain).any():
                rewards[its] = how.apply(
                    rewards=rewards[its], groups=given.groups[its], lengths=lengths[its], valid=valid[its]
                )
    turns = Turns.of(
        [[TurnReward(len(turn.token_ids), turn.reward, turn.agent) for turn in one.turns] for one in rollouts]
    )
    agents = [(domain, turn.agent) for domain, one in zip(domains, rollouts, strict=True) for turn in one.turns]
    roles = [f"{domain}/{agent}" if agent else domain for domain, agent in agents]
    ways = [(one, rules.shaping.get(domain, RewardShaping())) for one, domain in zip(rollouts, domains, strict=True)]
    parts = [how.parts(one.verdict.parts) for one, how in ways]
    scored = replace(
        given,
        rewards=rewards,
        valid=learns & rewarded if late else rewarded,
        turns=turns if objective.adv.credit is Credit.TURNS else None,
        parts=Parts.of(parts, rewards) if objective.adv.needs_parts else None,
        roles=Roles(roles, baselines) if objective.adv.state else None,
    )
    with np.errstate(invalid="ignore", over="ignore"):  # `check_columns` reports rewards that are not finite
        advantages = np.zeros(scored.num_tokens) if late else _advantages(objective, scored, {}, streams)
    by_rollout = np.split(advantages, np.cumsum(lengths)[:-1])
    taught = np.array([late or not objective.zero_advantage_is_idle or part.any() for part in by_rollout]) | ~rewarded
    computed = (
        np.flatnonzero(learns & taught).tolist() or np.flatnonzero(learns if learns.any() else valid)[:1].tolist()
    )
    batch = TrainBatch(
        groups=list(groups),
        rules=rules,
        objective=objective,
        producing=producing,
        scored=scored,
        streams=streams,
        learns=learns,
        computed=computed,
        segments=SegmentTable.of(rollouts),
        stats=_stats(rollouts, producing=producing, rewards=given.rewards, valid=valid, lengths=lengths)
        | {"masked": float((valid & ~learns).mean()), "idle_fraction": 1 - len(computed) / len(rollouts)},
        packed=[],
    )
    return batch.packed_with(by_rollout)


def _advantages(
    objective: PolicyObjective, scored: Scored, columns: Mapping[str, Floats], streams: NDArray[np.int32] | None
) -> Floats:
    advantages = objective.adv.advantages(scored, columns)
    return advantages if streams is None else with_constants(advantages, np.repeat(streams, scored.lengths))


def _stats(
    rollouts: Sequence[Rollout],
    *,
    producing: int,
    rewards: Floats,
    valid: NDArray[np.bool_],
    lengths: NDArray[np.intp],
) -> dict[str, float]:
    staleness = np.array([producing - rollout.oldest_version for rollout in rollouts])
    mixed = np.array([rollout.oldest_version != rollout.newest_version for rollout in rollouts])
    right = sum(rollout.verdict.outcome is Outcome.CORRECT for rollout in rollouts)
    rewards = rewards[valid]
    sampled = [rollouts[place].mean_version for place in np.flatnonzero(valid).tolist()]
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
        "lag_rms": float(np.sqrt(np.mean((staleness - 1.0) ** 2))),
        "mixed_version_fraction": float(mixed.mean()),
        "unjudged": float(len(rollouts) - rewards.size),
        **({"sampled_version": fmean(sampled)} if sampled else {}),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The data of one step, or of one of its mini-batches.

    Attributes:
        producing: the version that the step produces.
        streams: [B], each rollout's loss (`Loss.code`); None if all have the run's objective.
        learns: [B], True if the loss counts the rollout: it has a verdict and is not masked for being truncated.
        computed: indices of the rollouts that can have a gradient; if none can, of one rollout.
        segments: the segments of all B rollouts.
        packed: micro-batches of the segments to compute; their `members` are indices into `segments`.
        stats: the batch's metrics.
        number: the mini-batch's number among the planned optimizer steps of its batch, from 0.
    """

    groups: list[RolloutGroup]
    rules: BatchRules
    objective: PolicyObjective
    producing: int
    scored: Scored
    streams: NDArray[np.int32] | None
    learns: NDArray[np.bool_]
    computed: list[int]
    segments: SegmentTable
    stats: dict[str, float]
    packed: list[Packed]
    number: int = 0

    @property
    def optimizer_steps(self) -> range:
        """The planned optimizer steps, numbered from 0 in the whole run as if no earlier batch had ended early."""
        planned = self.rules.mini_batching.updates
        return range((self.producing - 1) * planned, self.producing * planned)

    @property
    def orders(self) -> list[int]:
        return [group.index for group in self.groups]

    @property
    def micro_batches(self) -> list[MicroBatch]:
        return [packed.micro_batch for packed in self.packed]

    def group_indices(self, number: int, broken: Bool | None = None) -> list[int]:
        """Return the sorted indices of groups in a micro-batch, or of those with `broken` tokens [T] in the mask."""
        rollouts = np.array(self.rollouts_of(number))
        if broken is not None:
            micro_batch = self.packed[number].micro_batch
            rollouts = rollouts[np.unique(micro_batch.segment_ids[broken & micro_batch.loss_mask])]
        return sorted({self.groups[group].index for group in self.scored.groups[rollouts].tolist()})

    # --- values that are not finite --------------------------------------------------------------------------------

    def check_columns(self) -> None:
        """Raise NonFiniteStep for the first input of the loss with NaN or infinity.

        Inputs are the rewards of valid verdicts, before and after shaping, and the columns at tokens in the loss mask.
        """
        scored = self.scored
        for rewards in (np.array([one.verdict.reward for one in self.segments.rollouts]), scored.rewards):
            broken = scored.valid & ~np.isfinite(rewards)
            if broken.any():
                raise NonFiniteStep("rewards", sorted({self.groups[i].index for i in scored.groups[broken].tolist()}))
        for name in _COLUMNS:
            self.check_finite([getattr(each, name) for each in self.micro_batches], what=name)

    def check_finite(self, columns: Sequence[Float32 | None], *, what: str) -> None:
        """Raise NonFiniteStep if a column [T], one per micro-batch, is not finite at a token in the loss mask."""
        groups: set[int] = set()
        for number, column in enumerate(columns):
            if column is not None:
                groups.update(self.group_indices(number, ~np.isfinite(column)))
        if groups:
            raise NonFiniteStep(what, sorted(groups))

    def check_terms(self, number: int, logprobs: Float32) -> None:
        """Compute the terms of micro-batch `number` in fp32 at these log-probs; raise NonFiniteStep for a bad one.

        Terms that read whole distributions are not checked, because only the trainer has the distributions.
        """
        objective, micro_batch = self.objective, self.packed[number].micro_batch
        names = (*_COLUMNS, "loss_mask", "segment_ids", "rollout_ids", "num_segments", "kl_coefficients")
        columns = {name: getattr(micro_batch, name) for name in names}
        with np.errstate(all="ignore"):
            tokens = Tokens.of(logprobs, columns)
            terms = {
                "is_weight": objective.is_weight.weight(tokens),
                "grad1": objective.grad1.value(tokens),
                **({} if objective.grad2.measure else {"grad2": objective.grad2.value(tokens)}),
                "loss gradient": objective.prediction_gradient(logprobs, columns),
            }
        for name, values in terms.items():
            if groups := self.group_indices(number, ~np.isfinite(values)):
                raise NonFiniteStep(name, groups)

    # --- columns and mini-batches ----------------------------------------------------------------------------------

    def rollouts_of(self, number: int) -> list[int]:
        """Return, for each segment of micro-batch `number`, the number of its rollout within the batch."""
        return [self.segments.owners[member] for member in self.packed[number].members]

    def drawn(self, seed: int, most: int) -> list[int]:
        """Draw up to `most` of the groups, by number, for the sample log; the choice depends on `seed` and version."""
        chosen: list[int] = rng.generator(seed, "samples", self.producing).permutation(len(self.groups))[:most].tolist()
        return chosen

    def with_columns(self, columns: Mapping[str, Sequence[Float32]]) -> TrainBatch:
        """Return a copy whose micro-batches have these columns, each given as one array [T] per micro-batch."""
        packed = []
        for number, (micro_batch, members) in enumerate(self.packed):
            its: dict[str, Any] = {name: arrays[number] for name, arrays in columns.items()}
            packed.append(Packed(replace(micro_batch, **its), members))
        return replace(self, packed=packed)

    def with_advantages(self) -> TrainBatch:
        """Return a copy with advantages (and a critic's returns), computed from the forward passes' columns."""
        objective = self.objective
        columns = {
            name: self.sampled([getattr(each, name) for each in self.micro_batches]) for name in objective.late_columns
        }
        computed = {"advantages": _advantages(objective, self.scored, columns, self.streams)}
        computed |= objective.grad2.choices(self.scored, columns | computed)
        if isinstance(objective.adv, GAE):
            computed["returns"] = objective.adv.returns(self.scored, columns)
        by_micro_batch: dict[str, list[Float32]] = {name: [] for name in computed}
        for micro_batch, members in self.packed:
            rows = self.segments.rows(members)
            for name, values in computed.items():
                column = np.zeros(micro_batch.num_tokens, np.float32)
                with np.errstate(over="ignore"):  # overflows become infinite; `check_columns` reports them
                    column[micro_batch.loss_mask] = values[rows]
                by_micro_batch[name].append(column)
        return self.with_columns(by_micro_batch)

    def sampled(self, columns: Iterable[Float32 | None], *, missing: float = 0.0) -> Floats:
        """Gather the values of sampled tokens, [N], from one array [T] per micro-batch; `missing` where unknown."""
        values = np.full(self.scored.num_tokens, missing)
        for (micro_batch, members), column in zip(self.packed, columns, strict=True):
            if column is not None:
                values[self.segments.rows(members)] = column[micro_batch.loss_mask]
        return values

    def portions(self, epoch: int) -> Iterator[tuple[list[int], Floats]]:
        """Yield the mini-batches of `epoch` (counted from 0) in the order of training.

        Each has the indices of its rollouts to compute, and token weights [B], 0 for rollouts outside it.
        """
        sizes, groups, losses = [0] * len(self.groups), self.scored.groups, self.rules.losses
        for row in self.computed:
            sizes[groups[row]] += self.segments.rollouts[row].num_tokens
        domains = [self.groups[group].domain for group in groups]
        for part in self.rules.mini_batching.dealt(sizes, producing=self.producing, epoch=epoch):
            inside = np.isin(groups, part)
            weights = losses.token_weights(
                self.objective.agg, domains, lengths=self.scored.lengths, groups=groups, valid=self.learns & inside
            )
            yield [row for row in self.computed if inside[row]], weights

    def packed_with(self, advantages: Sequence[Floats]) -> TrainBatch:
        """Pack the mini-batches of the first epoch; `advantages` has one array per rollout."""
        packed = []
        for rows, weights in self.portions(0):
            weighted = [
                WeightedRollout(
                    rollout=self.segments.rollouts[row],
                    advantages=advantages[row],
                    token_weight=float(weights[row]),
                    stream=None if self.streams is None else int(self.streams[row]),
                )
                for row in rows
            ]
            numbers = [number for row in rows for number in self.segments.of_rollout(row)]
            made = pack(
                weighted,
                token_budget=self.rules.token_budget,
                width=self.rules.width,
                whole=self.objective.reads_whole_rollouts,
            )
            packed += [Packed(micro_batch, [numbers[place] for place in places]) for micro_batch, places in made]
        return replace(self, packed=packed)

    def mini_batches(self) -> Iterator[TrainBatch]:
        """Yield the mini-batch of each optimizer step, epoch after epoch; `packed` must have all forward columns."""
        computed: dict[int, MicroBatch] = {}
        for epoch in range(self.rules.mini_batching.epochs):
            if epoch == 1:
                for micro_batch, members in self.packed:
                    computed |= zip(members, apart(micro_batch), strict=True)
            first = epoch * self.rules.mini_batching.mini_batches
            for number, (rows, weights) in enumerate(self.portions(epoch), start=first):
                if epoch == 0:
                    its = set(rows)
                    packed = [each for each in self.packed if self.segments.owners[each.members[0]] in its]
                else:
                    packed = self._repacked(rows, weights, computed)
                yield replace(self, packed=packed, number=number)

    def _repacked(self, rows: Sequence[int], token_weights: Floats, computed: Mapping[int, MicroBatch]) -> list[Packed]:
        numbers = [number for row in rows for number in self.segments.of_rollout(row)]
        owners = [self.segments.owners[number] for number in numbers]
        bins = bins_of(
            [computed[number].num_tokens for number in numbers],
            self.scored.groups[owners].tolist(),
            owners,
            token_budget=self.rules.token_budget,
            width=self.rules.width,
            whole=self.objective.reads_whole_rollouts,
        )
        packed = []
        for places in bins:
            members, its = [numbers[place] for place in places], [owners[place] for place in places]
            segments = [computed[member] for member in members]
            packed.append(Packed(joined(segments, token_weights=token_weights[its].tolist(), owners=its), members))
        return packed


def deal(sizes: Sequence[int], count: int, draw: np.random.Generator) -> list[list[int]]:
    """Distribute groups at random to `count` mini-batches: the largest remaining to each, in rounds, so that numbers of
    groups differ by at most one, and sizes by at most the largest group.
    """
    order = sorted(draw.permutation(len(sizes)).tolist(), key=lambda group: -sizes[group])
    parts: list[list[int]] = [[] for _ in range(count)]
    for first in range(0, len(order), count):
        for group, part in zip(order[first : first + count], draw.permutation(count).tolist(), strict=False):
            parts[part].append(group)
    return [sorted(part) for part in parts]
