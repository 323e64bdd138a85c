"""The training loop's records of how groups end and what each step consists of. They do not influence training.

`TrainingSamples` writes some groups of a step to a log for people to read. A few trained groups are drawn by seed and
step, so that the choice is unbiased and repeatable. The last filtered group represents all groups that were filtered
since the last step. Decoding, formatting and writing run on the log's own thread.
"""

from __future__ import annotations

import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from types import MappingProxyType
from typing import Final, NamedTuple, Self, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from inference_contract.schemas import FinishReason
from pipelinerl.observability.logs import without_secrets
from pipelinerl.observability.samples.record import (
    AnswerRecord,
    AnswerTokens,
    SampleGroup,
    SampleKind,
    TokenTexts,
    TurnRecord,
)
from pipelinerl.observability.samples.sample_log import SampleLog
from pipelinerl.rng import generator
from pipelinerl.training.rollouts.admission import GroupOutcome
from pipelinerl.training.rollouts.batch import TrainBatch
from pipelinerl.types import ROOT, Outcome, Rollout, RolloutGroup, Turn
from trainer_contract.types import Float32, LossStats, MicroBatch

#: Maximum number of filter reasons counted separately in a step, since a user's filter may give a new reason each time.
MOST_REASONS: Final = 20
OTHER_REASONS: Final = "other reasons"


@final
@dataclass(slots=True)
class DomainTallies:
    """Counts of the groups that ended since the last step, by domain and by tag."""

    _domains: dict[str, Tally] = field(default_factory=dict)
    _tags: dict[str, Tally] = field(default_factory=dict)

    def add(self, groups: Iterable[RolloutGroup]) -> None:
        """Count groups that were trained or filtered."""
        for group in groups:
            self._merge(group, Tally.of(group))

    def add_stale(self, group: RolloutGroup) -> None:
        """Count a group that was dropped as stale."""
        self._merge(group, Tally(stale=1))

    def take(self) -> StepFigures:
        """Return metrics of the groups since the last call, and reset the counts."""
        domains, tags = self._domains, _bounded(self._tags)
        self._domains, self._tags = {}, {}
        return StepFigures(_figures(domains), _figures(tags))

    def _merge(self, group: RolloutGroup, counts: Tally) -> None:
        self._domains.setdefault(group.domain, Tally()).merge(counts)
        for tag in dict.fromkeys(group.problem.tags[:_MOST_OF_A_GROUP]):
            self._tags.setdefault(tag, Tally()).merge(counts)


@final
@dataclass(slots=True)
class StepWatch:
    """Recorder of the groups that end between two steps; `samples` is None if no sample log is written."""

    samples: TrainingSamples | None = None
    _tallies: DomainTallies = field(default_factory=DomainTallies)
    _filtered: Counter[str] = field(default_factory=Counter)
    _example: tuple[RolloutGroup, str] | None = None

    def ended(self, groups: Iterable[RolloutGroup], outcome: GroupOutcome, why: str) -> None:
        """Record groups that ended without training, as filtered for the reason `why`, or as stale."""
        for group in groups:
            if outcome is GroupOutcome.STALE:
                self._tallies.add_stale(group)
                continue
            self._tallies.add([group])
            self._filtered[why if why in self._filtered or len(self._filtered) < MOST_REASONS else OTHER_REASONS] += 1
            self._example = (group, why)

    def stepped(
        self,
        batch: TrainBatch,
        micro_batches: Sequence[MicroBatch],
        *,
        version: int,
        losses: Sequence[LossStats | None] = (),
        entropies: Mapping[int, Float32] = MappingProxyType({}),
    ) -> StepFigures:
        """Return the metrics since the last step, and write samples of the step that made `version`.

        `micro_batches` have the advantages. `losses` are given by micro-batch, None where unknown; `entropies` by
        rollout number, for some rollouts. Both were computed with the weights from which the step started.
        """
        self._tallies.add(batch.groups)
        if self.samples is not None:
            filtered = None
            if self._example is not None:
                group, why = self._example
                filtered = FilteredGroups(counts=dict(self._filtered), example=group, why=why)
            self.samples.write(version, batch.groups, _results(batch, micro_batches, losses, entropies), filtered)
        self._filtered, self._example = Counter(), None
        return self._tallies.take()


def _results(
    batch: TrainBatch,
    micro_batches: Sequence[MicroBatch],
    losses: Sequence[LossStats | None],
    entropies: Mapping[int, Float32],
) -> Callable[[int], RolloutResult]:
    """Return a function that maps a rollout's number within the batch to the step's results for it."""
    advantages, trained = mean_advantages(batch, micro_batches)
    return lambda row: RolloutResult(
        shaped=_finite(batch.scored.rewards[row]),
        advantage=_finite(advantages[row]),
        trained=bool(trained[row]),
        tokens=_tokens_of(row, batch, micro_batches, losses, entropies),
    )


def _tokens_of(
    row: int,
    batch: TrainBatch,
    micro_batches: Sequence[MicroBatch],
    losses: Sequence[LossStats | None],
    entropies: Mapping[int, Float32],
) -> TrainedTokens | None:
    own = batch.segments.of_rollout(row)
    start, length = int(batch.scored.lengths[:row].sum()), int(batch.scored.lengths[row])
    advantages, logprobs = np.zeros(length, np.float32), np.zeros(length, np.float32)
    trained, has_logprobs = False, bool(losses)
    for number, (packed, micro_batch) in enumerate(zip(batch.packed, micro_batches, strict=True)):
        loss = losses[number] if losses else None
        for place, member in enumerate(packed.members):
            if member not in own:
                continue
            first, end = np.searchsorted(micro_batch.segment_ids, (place, place + 1)).tolist()
            mask, rows = micro_batch.loss_mask[first:end], batch.segments.rows([member]) - start
            trained = True
            advantages[rows] = micro_batch.advantages[first:end][mask]
            if loss is None:
                has_logprobs = False
            else:
                logprobs[rows] = loss.predictions[first:end][mask]
    if not trained:
        return None
    return TrainedTokens(
        advantages=advantages, logprobs=logprobs if has_logprobs else None, entropies=entropies.get(row)
    )


def mean_advantages(
    batch: TrainBatch, micro_batches: Sequence[MicroBatch]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return each rollout's mean advantage [B], and a mask [B] of the rollouts that are in a micro-batch of the step.

    The mean is NaN for a rollout that the loss excludes, and 0 for other rollouts outside the micro-batches.
    """
    sums, trained = np.zeros(len(batch.learns)), np.zeros(len(batch.learns), bool)
    for number, micro_batch in enumerate(micro_batches):
        rollouts = np.array(batch.rollouts_of(number))
        of_tokens = rollouts[micro_batch.segment_ids[micro_batch.loss_mask]]
        sums += np.bincount(of_tokens, micro_batch.advantages[micro_batch.loss_mask], minlength=len(sums))
        trained[rollouts] = True
    means = sums / np.maximum(batch.scored.lengths, 1)
    return np.where(trained | batch.learns, means, np.nan), trained


#: Maximum number of tags with their own metrics in a step. Those with most rollouts are chosen; all others are counted
#: together.
MOST_TAGS: Final = 50
#: Name under which all other tags are counted together.
OTHER_TAGS: Final = "other"
#: Maximum number of tags that are counted and recorded for one group, and the same for parts of a reward.
_MOST_OF_A_GROUP: Final = 16


class StepFigures(NamedTuple):
    """Metrics by name, for each domain and each tag."""

    by_domain: dict[str, dict[str, float]]
    by_tag: dict[str, dict[str, float]]


@final
@dataclass(slots=True)
class Tally:
    """Counts of groups and rollouts of one domain or tag."""

    groups: int = 0
    stale: int = 0
    judged_groups: int = 0
    all_right: int = 0
    all_wrong: int = 0
    judged: int = 0
    right: int = 0
    truncated: int = 0
    reward: float = 0.0
    episodes: int = 0
    turns: int = 0
    begun: Counter[str] = field(default_factory=Counter)
    parts: dict[str, tuple[float, int]] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, group: RolloutGroup) -> Self:
        """Return the counts of one group that was trained or filtered."""
        counts, wrong = cls(groups=1), 0
        for rollout in group.rollouts:
            verdict = rollout.verdict
            counts.lengths.append(rollout.num_sampled_tokens)
            counts.truncated += rollout.finish_reason == FinishReason.LENGTH
            if rollout.turns and rollout.turns[0].agent:
                counts.episodes += 1
                counts.turns += len(rollout.turns)
                counts.begun.update(turn.begins for turn in rollout.turns if turn.begins)
            if verdict.outcome.is_judgement:
                counts.judged += 1
                counts.right += verdict.outcome is Outcome.CORRECT
                wrong += verdict.outcome is Outcome.WRONG
                counts.reward += verdict.reward
                for name, reward in verdict.parts[:_MOST_OF_A_GROUP]:
                    total, count = counts.parts.get(name, (0.0, 0))
                    counts.parts[name] = (total + reward, count + 1)
        if counts.judged:
            counts.judged_groups = 1
            counts.all_right, counts.all_wrong = int(counts.right == counts.judged), int(wrong == counts.judged)
        return counts

    def merge(self, other: Tally) -> None:
        """Add the counts of another tally."""
        for name in (each.name for each in fields(self) if each.name != "parts"):
            setattr(self, name, operator.iadd(getattr(self, name), getattr(other, name)))
        for name, (total, count) in other.parts.items():
            before, number = self.parts.get(name, (0.0, 0))
            self.parts[name] = (before + total, number + count)

    def figures(self) -> dict[str, float]:
        """Return metrics by name; leave out each ratio whose denominator would be 0."""
        rollouts = len(self.lengths)
        figures: dict[str, float] = {
            "rollouts": rollouts,
            "groups": self.groups,
            "stale_groups": self.stale,
            "stale": self.stale / max(1, self.stale + self.groups),
        }
        if rollouts:
            figures["length_mean"] = sum(self.lengths) / rollouts
            figures["length_p95"] = _percentile(sorted(self.lengths), 0.95)
            figures["truncated"] = self.truncated / rollouts
            figures["unjudged"] = 1 - self.judged / rollouts
        if self.episodes:
            figures["turns"] = self.turns / self.episodes
            figures["segments"] = self.begun.total() / self.episodes
            figures |= {f"segments.{reason}": count for reason, count in sorted(self.begun.items())}
        if self.judged:
            figures["reward"] = self.reward / self.judged
            figures["accuracy"] = self.right / self.judged
            figures["all_right"] = self.all_right / self.judged_groups
            figures["all_wrong"] = self.all_wrong / self.judged_groups
            figures |= {f"reward.{name}": total / count for name, (total, count) in self.parts.items()}
        return figures


def _percentile(rising: Sequence[int], share: float) -> float:
    """Return the linearly interpolated percentile of a sorted list; on short lists, numpy's is 50 times slower."""
    place = share * (len(rising) - 1)
    below = int(place)
    above = min(below + 1, len(rising) - 1)
    return rising[below] + (rising[above] - rising[below]) * (place - below)


def _bounded(tags: Mapping[str, Tally]) -> dict[str, Tally]:
    ranked = sorted(tags, key=lambda tag: (-len(tags[tag].lengths), tag))
    kept = {tag: tags[tag] for tag in sorted(ranked[:MOST_TAGS])}
    for tag in ranked[MOST_TAGS:]:
        kept.setdefault(OTHER_TAGS, Tally()).merge(tags[tag])
    return kept


def _figures(tallies: Mapping[str, Tally]) -> dict[str, dict[str, float]]:
    return {name: tally.figures() for name, tally in tallies.items()}


T = TypeVar("T")

#: Function that decodes token ids to text, including special tokens.
Decode = Callable[[Sequence[int]], str]

#: Maximum number of different tokens whose texts are cached.
_MOST_TEXTS: Final = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredGroups:
    """The groups that were filtered since the last step: counts by reason, and the last of them as an example."""

    counts: Mapping[str, int]
    example: RolloutGroup
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """Values that a step computed for one rollout's sampled tokens, f32 [N] each; None if unknown."""

    advantages: Float32
    logprobs: Float32 | None
    entropies: Float32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutResult:
    """A step's results for one rollout; the defaults are those of a rollout that was not in the step.

    `shaped` is the shaped reward, and `advantage` the mean advantage of the rollout's tokens; each is None if not
    finite. `trained` is True if the rollout was in a micro-batch of the step; otherwise `tokens` is None.
    """

    shaped: float | None = None
    advantage: float | None = None
    trained: bool = False
    tokens: TrainedTokens | None = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSamples:
    """Writer of some groups of each step to the sample log."""

    log: SampleLog
    decode: Decode
    seed: int
    groups_per_step: int
    _texts: dict[int, str] = field(default_factory=dict)

    def write(
        self,
        version: int,
        groups: Sequence[RolloutGroup],
        result_of: Callable[[int], RolloutResult],
        filtered: FilteredGroups | None,
    ) -> None:
        """Write some groups of the step that made `version`, and a group that was filtered before it.

        `result_of` returns the results of a rollout, given its number within the step.
        """
        ends = np.cumsum([len(group.rollouts) for group in groups]).tolist()
        picked = []
        for number in sorted(drawn(self.seed, version, len(groups), self.groups_per_step)):
            group, end = groups[number], ends[number]
            picked.append((group, [result_of(row) for row in range(end - len(group.rollouts), end)]))
        now = time.time()
        self.log.put(lambda: self._made(version, picked, filtered, now))

    def _made(
        self,
        version: int,
        picked: Sequence[tuple[RolloutGroup, Sequence[RolloutResult]]],
        filtered: FilteredGroups | None,
        now: float,
    ) -> Iterator[SampleGroup]:
        for group, results in picked:
            yield self._group(SampleKind.TRAINED, group, version, results, now)
        if filtered is not None:
            group = filtered.example
            results = [RolloutResult()] * len(group.rollouts)
            yield self._group(
                SampleKind.FILTERED, group, version, results, now, why=filtered.why, counts=filtered.counts
            )

    def _group(
        self,
        kind: SampleKind,
        group: RolloutGroup,
        version: int,
        results: Sequence[RolloutResult],
        now: float,
        *,
        why: str = "",
        counts: Mapping[str, int] | None = None,
    ) -> SampleGroup:
        prompt = group.rollouts[0].turns[0].context_token_ids
        context = prompt.tolist()
        return SampleGroup(
            kind=kind,
            step=version,
            time=now,
            group_id=group.group_id,
            domain=group.domain,
            problem_id=group.problem.problem_id,
            tags=group.problem.tags[:_MOST_OF_A_GROUP],
            prompt=self.decode(context),
            prompt_tokens=self._tokens(context),
            ground_truth=group.problem.ground_truth,
            answers=tuple(
                self._answer(rollout, version, prompt, result)
                for rollout, result in zip(group.rollouts, results, strict=True)
            ),
            why=why,
            filtered=dict(counts or {}),
        )

    def _answer(self, rollout: Rollout, version: int, prompt: NDArray[np.int32], result: RolloutResult) -> AnswerRecord:
        verdict, (first, *later) = rollout.verdict, rollout.turns
        tokens = [first.token_ids, *(each for turn in later for each in (turn.context_token_ids, turn.token_ids))]
        token_ids: list[int] = np.concatenate(tokens).tolist()
        has_turns = bool(later) or not np.array_equal(first.context_token_ids, prompt)
        return AnswerRecord(
            text=self.decode(token_ids),
            outcome=verdict.outcome.value,
            reward=_finite(verdict.reward) if verdict.outcome.is_judgement else None,
            reason=without_secrets(verdict.reason),
            parts=tuple(
                (part.name, part.reward) for part in verdict.parts[:_MOST_OF_A_GROUP] if math.isfinite(part.reward)
            ),
            shaped=result.shaped,
            advantage=result.advantage,
            length=rollout.num_sampled_tokens,
            finish_reason=rollout.finish_reason,
            spans=tuple((span.model_version, span.num_tokens) for turn in rollout.turns for span in turn.spans),
            staleness=version - rollout.oldest_version,
            trained=result.trained,
            tokens=self._columns(rollout, token_ids, result.tokens),
            turns=self._turns(rollout, prompt) if has_turns else (),
        )

    def _turns(self, rollout: Rollout, prompt: NDArray[np.int32]) -> tuple[TurnRecord, ...]:
        parents = rollout.parents or range(ROOT, len(rollout.turns) - 1)
        segment_of = {turn: number for number, each in enumerate(rollout.segments, 1) for turn in each.trained}
        return tuple(
            TurnRecord(
                context=self._context(turn, prompt),
                text=self.decode(turn.token_ids.tolist()),
                agent=turn.agent,
                length=len(turn.token_ids),
                reward=turn.reward,
                segment=segment_of[number],
                begins=turn.begins,
                continues=parent + 1,
            )
            for number, (turn, parent) in enumerate(zip(rollout.turns, parents, strict=True))
        )

    def _context(self, turn: Turn, prompt: NDArray[np.int32]) -> str:
        its = turn.context_token_ids
        return "" if np.array_equal(its, prompt) else self.decode(its.tolist())

    def _columns(self, rollout: Rollout, token_ids: Sequence[int], trained: TrainedTokens | None) -> AnswerTokens:
        gaps = [0, *(len(turn.context_token_ids) for turn in rollout.turns[1:])]
        counts = [len(turn.token_ids) for turn in rollout.turns]

        def spread(values: Sequence[T]) -> tuple[T | None, ...]:
            """Spread values of sampled tokens over all tokens of a turn, with None at tokens of the environment."""
            if len(counts) == 1:
                return tuple(values)
            rest = iter(values)
            parts = zip(gaps, counts, strict=True)
            return tuple(each for gap, count in parts for each in (*(None,) * gap, *islice(rest, count)))

        versions = [span.model_version for turn in rollout.turns for span in turn.spans for _ in range(span.num_tokens)]
        logprobs = [each for turn in rollout.turns for each in turn.behavior_logprobs.tolist()]
        ours = [] if trained is None or trained.logprobs is None else trained.logprobs.tolist()
        entropies = [] if trained is None or trained.entropies is None else trained.entropies.tolist()
        deltas = [a - b for a, b in zip(ours, logprobs, strict=False)]
        return AnswerTokens(
            tokens=self._tokens(token_ids),
            versions=spread(versions),
            logprobs=spread(_rounded(logprobs, "%.7g")),
            deltas=spread(_rounded(deltas, "%.3g")) if deltas else (),
            advantages=spread(_rounded(trained.advantages.tolist(), "%.4g")) if trained is not None else (),
            entropies=spread(_rounded(entropies, "%.4g")) if entropies else (),
        )

    def _tokens(self, token_ids: Sequence[int]) -> TokenTexts:
        return TokenTexts(ids=tuple(token_ids), texts=tuple(map(self._text, token_ids)))

    def _text(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self.decode([token_id]).encode(errors="replace").decode()
            if len(self._texts) < _MOST_TEXTS:
                self._texts[token_id] = text
        return text


def drawn(seed: int, version: int, groups: int, most: int) -> list[int]:
    """Draw up to `most` of a step's groups, by number, for the sample log; the step makes `version`."""
    chosen: list[int] = generator(seed, "samples", version).permutation(groups)[:most].tolist()
    return chosen


def _rounded(values: Sequence[float], form: str) -> list[float | None]:
    """Round values to the format `form`, to keep records small; None for values that are not finite."""
    return [float(form % value) if math.isfinite(value) else None for value in values]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
