"""Packing of rollouts of different lengths into micro-batches of limited size, without padding.

The unit of packing is the segment: a conversation is one segment, and an episode that branched has several
(`types.Rollout.segments`). If they fit, all segments of an episode are in one micro-batch, so that a trainer can
compute their common prefix once. For a trainer that computes several micro-batches at once, rollouts are first
distributed so that work is balanced. Weights and advantages are computed before packing, so packing does not affect the
gradient.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from pipelinerl.types import Rollout, Segment
from trainer_contract.types import Bool, Float32, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedRollout:
    """A rollout with advantages [N] and the weight of its sampled tokens; `stream` is its loss (`Loss.code`)."""

    rollout: Rollout
    advantages: NDArray[np.floating]
    token_weight: float
    stream: int | None = None


class Packed(NamedTuple):
    """A micro-batch, and the numbers (see `SegmentTable`) of its segments, in the order of the micro-batch."""

    micro_batch: MicroBatch
    members: list[int]


@dataclass(frozen=True, slots=True)
class SegmentTable:
    """The S segments of B rollouts, numbered rollout after rollout; `owners` [S] are their rollouts."""

    rollouts: Sequence[Rollout]
    segments: list[Segment]
    owners: list[int]

    @classmethod
    def of(cls, rollouts: Sequence[Rollout]) -> Self:
        segments: list[Segment] = []
        owners: list[int] = []
        for number, rollout in enumerate(rollouts):
            its = rollout.segments
            segments += its
            owners += [number] * len(its)
        return cls(rollouts, segments, owners)

    def of_rollout(self, number: int) -> range:
        return range(bisect_left(self.owners, number), bisect_right(self.owners, number))

    def rows(self, members: Sequence[int]) -> NDArray[np.intp]:
        """Return the tokens that the segments `members` train, as indices into all B rollouts' sampled tokens."""
        starts = np.cumsum([0, *(rollout.num_sampled_tokens for rollout in self.rollouts)])
        parts = [starts[self.owners[i]] + self.rows_within(i) for i in members]
        return np.concatenate(parts) if parts else np.zeros(0, np.intp)

    def rows_within(self, number: int) -> NDArray[np.intp]:
        """Return the tokens that segment `number` trains, as indices into its own rollout's sampled tokens."""
        rollout = self.rollouts[self.owners[number]]
        if not rollout.parents:
            return np.arange(rollout.num_sampled_tokens)
        lengths = [turn.token_ids.shape[0] for turn in rollout.turns]
        ends = np.cumsum(lengths)
        return np.concatenate([np.arange(ends[i] - lengths[i], ends[i]) for i in self.segments[number].trained])


#: Cost of one query-key pair in attention, relative to a token's cost in the other layers: 1/(6·d) for hidden size d =
#: 2048. It is only used to balance micro-batches that a trainer computes at once.
_ATTENTION: Final = 1 / 12288


def work(length: int) -> float:
    """Return the estimated cost of L = `length` tokens, L + a·L² (a: relative cost of attention), in tokens."""
    return length + _ATTENTION * length**2


def pack(
    rollouts: Sequence[WeightedRollout], *, token_budget: int, width: int = 1, whole: bool = False
) -> list[Packed]:
    """Pack rollouts into micro-batches of up to `token_budget` tokens; a longer segment gets its own micro-batch.

    The trainer computes `width` micro-batches at once, so work is balanced among them. The segments of a rollout that
    exceeds the budget are split over micro-batches unless `whole` is set, which objectives with a term of whole
    rollouts need, such as GSPO's ratio of a sequence.
    """
    table = SegmentTable.of([each.rollout for each in rollouts])
    prompts = [segment.turns[0].context_token_ids.tobytes() for segment in table.segments]
    lengths = [segment.num_tokens for segment in table.segments]
    bins = bins_of(lengths, prompts, table.owners, token_budget=token_budget, width=width, whole=whole)
    return [Packed(_micro_batch(rollouts, table, members), members) for members in bins]


def bins_of(
    lengths: Sequence[int],
    prompts: Sequence[Hashable],
    owners: Sequence[int],
    *,
    token_budget: int,
    width: int,
    whole: bool,
) -> list[list[int]]:
    """Return each micro-batch's segments: those of a rollout together if they fit, by first fit in an order in which
    rollouts of one prompt are adjacent, so that a trainer can compute the prompt once.
    """
    by_owner: dict[int, list[int]] = {}
    for i, owner in enumerate(owners):
        by_owner.setdefault(owner, []).append(i)
    units: list[list[int]] = []
    for segments in by_owner.values():
        fits = whole or sum(lengths[i] for i in segments) <= token_budget
        units += [segments] if fits else [[i] for i in segments]
    sizes = [sum(lengths[i] for i in unit) for unit in units]
    order = by_prompt(sizes, [prompts[unit[0]] for unit in units])
    if width == 1:
        bins = first_fit(order, sizes, token_budget)
    else:
        place = {unit: number for number, unit in enumerate(order)}
        parts = dealt(sorted(order, key=lambda unit: (-sizes[unit], unit)), sizes, width)
        bins = interleaved(
            [first_fit(sorted(part, key=place.__getitem__), sizes, token_budget) for part in parts], sizes
        )
    return [[i for unit in bin for i in units[unit]] for bin in bins]


def by_prompt(lengths: Sequence[int], prompts: Sequence[Hashable]) -> list[int]:
    """Return the packing order: rollouts of one prompt are adjacent; the prompt of the longest rollout comes first."""
    first, longest = dict[Hashable, int](), dict[Hashable, int]()
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        first.setdefault(prompt, i)
        longest[prompt] = max(length, longest.get(prompt, 0))
    return sorted(range(len(lengths)), key=lambda i: (-longest[prompts[i]], first[prompts[i]], -lengths[i], i))


def dealt(order: Sequence[int], lengths: Sequence[int], width: int) -> list[list[int]]:
    """Distribute rollouts in `order` (longest first) to `width` parts; each goes to the part with least work so far."""
    parts: list[list[int]] = [[] for _ in range(width)]
    least = [(0.0, part) for part in range(width)]
    for i in order:
        so_far, part = heapq.heappop(least)
        parts[part].append(i)
        heapq.heappush(least, (so_far + work(lengths[i]), part))
    return parts


def interleaved(parts: Sequence[list[list[int]]], lengths: Sequence[int]) -> list[list[int]]:
    """Order the micro-batches (bins) of all parts for computation: the first of each part, then the second of each.

    Beforehand, the bins with most work are halved until all parts have as many bins, and each part's bins are sorted by
    work, so that bins computed at once are similar. If a part has too few rollouts, all bins are sorted instead.
    """

    def its_work(bin: Sequence[int]) -> float:
        return sum(work(lengths[i]) for i in bin)

    rounds, even = max(len(bins) for bins in parts), []
    for part in parts:
        bins = [list(bin) for bin in part]
        while len(bins) < rounds and (splittable := [bin for bin in bins if len(bin) > 1]):
            largest = max(splittable, key=its_work)
            bins.remove(largest)
            bins += dealt(largest, lengths, 2)
        even.append(sorted(bins, key=its_work, reverse=True))
    if all(len(bins) == rounds for bins in even):
        return [bins[number] for number in range(rounds) for bins in even]
    return sorted((bin for bins in even for bin in bins), key=its_work, reverse=True)


def first_fit(order: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Fill bins of at most `token_budget` tokens by first fit, in `order`; a longer item gets its own bin."""
    bins: list[list[int]] = []
    room: list[int] = []
    for i in order:
        slot = next((b for b, free in enumerate(room) if free >= lengths[i]), None)
        if slot is None:
            bins.append([i])
            room.append(token_budget - lengths[i])
        else:
            bins[slot].append(i)
            room[slot] -= lengths[i]
    return bins


def alone(rollouts: Sequence[Rollout]) -> MicroBatch:
    """Return these rollouts as one micro-batch with advantages and weights 0, for checks and forward passes."""
    weighted = [
        WeightedRollout(rollout=rollout, advantages=np.zeros(rollout.num_sampled_tokens), token_weight=0.0)
        for rollout in rollouts
    ]
    table = SegmentTable.of(rollouts)
    return _micro_batch(weighted, table, range(len(table.owners)))


def prefixes(batch: MicroBatch, *, through: Bool) -> tuple[MicroBatch, Bool]:
    """Cut each segment after its last token in `through` [T], if any; also return the mask of kept tokens."""
    last = np.full(batch.num_segments, -1)
    where = np.flatnonzero(through)
    last[batch.segment_ids[where]] = where  # indices ascend, so the last one written for a segment is its largest
    kept = np.arange(batch.num_tokens) <= last[batch.segment_ids]
    if kept.all():
        return batch, kept
    given = {name: column[kept] for name, column in _arrays(batch).items()}
    names, given["segment_ids"] = np.unique(given["segment_ids"], return_inverse=True)
    given["segment_ids"] = given["segment_ids"].astype(np.int32)
    # These micro-batches only get forward passes, so it does not matter to which rollout a segment belongs.
    return replace(batch, **given | {"rollout_ids": None}, num_segments=len(names)), kept


def apart(batch: MicroBatch) -> list[MicroBatch]:
    """Return each segment as its own micro-batch, whose columns are views."""
    ends = np.cumsum(np.bincount(batch.segment_ids, minlength=batch.num_segments))
    arrays = _arrays(batch)
    segments = []
    for first, end in zip((0, *ends[:-1]), ends, strict=True):
        columns = {name: column[first:end] for name, column in arrays.items()}
        columns |= {"segment_ids": np.zeros(end - first, np.int32), "rollout_ids": None}
        segments.append(replace(batch, **columns, num_segments=1))
    return segments


def _arrays(batch: MicroBatch) -> dict[str, Any]:
    columns = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: column for name, column in columns.items() if isinstance(column, np.ndarray)}


def joined(segments: Sequence[MicroBatch], *, token_weights: Sequence[float], owners: Sequence[int]) -> MicroBatch:
    """Join separate segments into one micro-batch; `token_weights` and `owners` have one entry per segment."""
    first, lengths = segments[0], [segment.num_tokens for segment in segments]
    columns = {name: np.concatenate([getattr(segment, name) for segment in segments]) for name in _arrays(first)}
    columns["segment_ids"] = np.repeat(np.arange(len(segments), dtype=np.int32), lengths)
    columns["weights"] = np.repeat(np.array(token_weights, np.float32), lengths) * columns["loss_mask"]
    return replace(first, **columns, rollout_ids=_rollout_ids(owners, lengths), num_segments=len(segments))


def _rollout_ids(owners: Sequence[int], lengths: Sequence[int] | NDArray[np.intp]) -> NDArray[np.int32] | None:
    if len(owners) == len(set(owners)):
        return None
    _, numbers = np.unique(owners, return_inverse=True)
    return np.repeat(numbers.astype(np.int32), lengths)


def _micro_batch(rollouts: Sequence[WeightedRollout], table: SegmentTable, members: Sequence[int]) -> MicroBatch:
    segments, owners = [table.segments[i] for i in members], [table.owners[i] for i in members]
    given = [rollouts[owner] for owner in owners]
    turns = [turn for segment in segments for turn in segment.turns]
    trained = [turn for segment in segments for turn in segment.turns[segment.num_repeated :]]
    trains = [place >= segment.num_repeated for segment in segments for place in range(len(segment.turns))]
    flags = np.array([part for does in trains for part in (False, does)])
    token_ids = np.concatenate([part for turn in turns for part in (turn.context_token_ids, turn.token_ids)])
    run_lengths = np.array([n for turn in turns for n in (turn.context_token_ids.shape[0], turn.token_ids.shape[0])])
    loss_mask = np.repeat(flags, run_lengths)
    lengths = np.add.reduceat(run_lengths, np.cumsum([0, *(2 * len(segment.turns) for segment in segments)])[:-1])
    behavior = np.zeros(token_ids.shape[0], np.float32)
    behavior[loss_mask] = np.concatenate([turn.behavior_logprobs for turn in trained])
    advantages = np.zeros(token_ids.shape[0], np.float32)
    with np.errstate(over="ignore"):  # values that overflow fp32 become infinite, and `check_columns` reports them
        advantages[loss_mask] = np.concatenate(
            [each.advantages[table.rows_within(i)] for i, each in zip(members, given, strict=True)]
        )
    versions = np.zeros(token_ids.shape[0], np.int32)
    spans = np.array([span for turn in trained for span in turn.spans], np.int32).reshape(-1, 2)
    versions[loss_mask] = np.repeat(spans[:, 0], spans[:, 1])
    routed = [part for turn in turns for part in (turn.context_routed_experts, turn.routed_experts)]
    experts = [part for part in routed if part is not None]
    is_routed = len(experts) == len(routed) and len({(part.dtype, part.shape[1:]) for part in experts}) == 1
    streams = [each.stream for each in given if each.stream is not None]

    def spread(values: Sequence[float]) -> Float32:
        return np.repeat(np.array(values, np.float32), lengths)

    starts: NDArray[np.int64] = np.cumsum(lengths) - lengths
    return MicroBatch(
        token_ids=token_ids.astype(np.int32, copy=False),
        position_ids=(np.arange(token_ids.shape[0]) - np.repeat(starts, lengths)).astype(np.int32),
        segment_ids=np.repeat(np.arange(len(members), dtype=np.int32), lengths),
        rollout_ids=_rollout_ids(owners, lengths),
        loss_mask=loss_mask,
        advantages=advantages,
        weights=spread([each.token_weight for each in given]) * loss_mask,
        behavior_logprobs=behavior,
        temperatures=spread([each.rollout.temperature for each in given]),
        behavior_versions=versions,
        streams=np.repeat(np.array(streams, np.int32), lengths) if streams else None,
        routed_experts=np.concatenate(experts) if is_routed else None,
        num_segments=len(members),
    )
