"""Choice of a step's groups that are kept for readers, and of what is kept of them.

A few groups of each step are drawn by seed and step, so that the choice is unbiased and a repeated run shows the same
ones. One of the groups filtered since the last step represents all of them. Everything but the draw, including the
decoding, runs on the log's thread. Tokens are kept as they were sampled and trained on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, TypeVar, final

import numpy as np
from numpy.typing import NDArray

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
from pipelinerl.types import ROOT, Rollout, RolloutGroup, Turn
from trainer_contract.types import Float32

T = TypeVar("T")

#: Returns the text of token ids, special tokens included.
Decode = Callable[[Sequence[int]], str]

#: Bound of a group's tags that are kept, and of the parts of a reward.
_MOST: Final = 16
#: Number of different tokens whose texts are cached.
_MOST_TEXTS: Final = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredGroups:
    """The groups that were filtered since the last step: counts by reason, and the last group."""

    counts: Mapping[str, int]
    example: RolloutGroup
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """The sampled tokens of one rollout in its step, f32 [N], turn after turn.

    Attributes:
        logprobs: the trainer's; None if the policy stood still.
        entropies: of the distributions from which they were sampled; None if not measured.
    """

    advantages: Float32
    logprobs: Float32 | None
    entropies: Float32 | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """The results of a step's rollouts, [B] each, group after group.

    Attributes:
        shaped: rewards from which advantages were computed. advantages: means over the tokens; NaN if there is none.
        trained: True if the rollout had a gradient.
        tokens_of: the tokens of a rollout by its number; None if it had no gradient.
    """

    groups: Sequence[RolloutGroup]
    shaped: NDArray[np.float64]
    advantages: NDArray[np.float64]
    trained: NDArray[np.bool_]
    tokens_of: Callable[[int], TrainedTokens | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """The results of one rollout."""

    shaped: float | None = None
    advantage: float | None = None
    trained: bool = False
    tokens: TrainedTokens | None = None


_UNTRAINED: Final = _Trained()


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSamples:
    """Writer of samples of the steps to a log."""

    log: SampleLog
    decode: Decode
    seed: int
    groups_per_step: int
    _texts: dict[int, str] = field(default_factory=dict)

    def write(self, version: int, step: StepRollouts, filtered: FilteredGroups | None) -> None:
        """Write some groups of the step that made `version`, and a group that was filtered before it."""
        chosen = drawn(self.seed, version, len(step.groups), self.groups_per_step)
        now = time.time()
        ends = np.cumsum([len(group.rollouts) for group in step.groups]).tolist()
        picked = [
            (group := step.groups[number], [self._part(step, row) for row in _rows(ends[number], group)])
            for number in sorted(chosen)
        ]
        self.log.put(lambda: self._made(version, picked, filtered, now))

    def _part(self, step: StepRollouts, row: int) -> _Trained:
        return _Trained(
            shaped=_finite(step.shaped[row]),
            advantage=_finite(step.advantages[row]),
            trained=bool(step.trained[row]),
            tokens=step.tokens_of(row),
        )

    def _made(
        self,
        version: int,
        picked: Sequence[tuple[RolloutGroup, Sequence[_Trained]]],
        filtered: FilteredGroups | None,
        now: float,
    ) -> Iterator[SampleGroup]:
        for group, parts in picked:
            answers = tuple(
                self._answer(rollout, version, _prompt(group), part)
                for rollout, part in zip(group.rollouts, parts, strict=True)
            )
            yield self._group(SampleKind.TRAINED, group, version, answers, now)
        if filtered is not None:
            group = filtered.example
            answers = tuple(self._answer(rollout, version, _prompt(group)) for rollout in group.rollouts)
            yield self._group(
                SampleKind.FILTERED, group, version, answers, now, why=filtered.why, counts=filtered.counts
            )

    def _group(
        self,
        kind: SampleKind,
        group: RolloutGroup,
        version: int,
        answers: tuple[AnswerRecord, ...],
        now: float,
        *,
        why: str = "",
        counts: Mapping[str, int] | None = None,
    ) -> SampleGroup:
        context = _prompt(group).tolist()
        return SampleGroup(
            kind=kind,
            step=version,
            time=now,
            group_id=group.group_id,
            domain=group.domain,
            problem_id=group.problem.problem_id,
            tags=group.problem.tags[:_MOST],
            prompt=self.decode(context),
            prompt_tokens=self._tokens(context),
            ground_truth=group.problem.ground_truth,
            answers=answers,
            why=why,
            filtered=dict(counts or {}),
        )

    def _answer(
        self, rollout: Rollout, version: int, prompt: NDArray[np.int32], part: _Trained = _UNTRAINED
    ) -> AnswerRecord:
        verdict, (first, *later) = rollout.verdict, rollout.turns
        tokens = [first.token_ids, *(each for turn in later for each in (turn.context_token_ids, turn.token_ids))]
        token_ids: list[int] = np.concatenate(tokens).tolist()
        return AnswerRecord(
            text=self.decode(token_ids),
            outcome=verdict.outcome.value,
            reward=_finite(verdict.reward) if verdict.outcome.is_judgement else None,
            reason=without_secrets(verdict.reason),
            parts=tuple((part.name, part.reward) for part in verdict.parts[:_MOST] if math.isfinite(part.reward)),
            shaped=part.shaped,
            advantage=part.advantage,
            length=rollout.num_sampled_tokens,
            finish_reason=rollout.finish_reason,
            spans=tuple((span.model_version, span.num_tokens) for turn in rollout.turns for span in turn.spans),
            staleness=version - rollout.oldest_version,
            trained=part.trained,
            tokens=self._columns(rollout, token_ids, part.tokens),
            turns=self._turns(rollout, prompt) if len(rollout.turns) > 1 else (),
        )

    def _turns(self, rollout: Rollout, prompt: NDArray[np.int32]) -> tuple[TurnRecord, ...]:
        """Return the turns of an episode, without the group's prompt, which is stored once."""
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
        """Return the columns of an answer; `token_ids` are all tokens after the prompt."""
        gaps = [0, *(len(turn.context_token_ids) for turn in rollout.turns[1:])]
        counts = [len(turn.token_ids) for turn in rollout.turns]

        def spread(values: Sequence[T]) -> tuple[T | None, ...]:
            """Return the values at the sampled tokens, and None at tokens of the environment."""
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
            logprobs=spread(_told(logprobs, "%.7g")),
            deltas=spread(_told(deltas, "%.3g")) if deltas else (),
            advantages=spread(_told(trained.advantages.tolist(), "%.4g")) if trained is not None else (),
            entropies=spread(_told(entropies, "%.4g")) if entropies else (),
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
    """Return the numbers of the groups that are kept of the step that makes a version."""
    chosen: list[int] = generator(seed, "samples", version).permutation(groups)[:most].tolist()
    return chosen


def _prompt(group: RolloutGroup) -> NDArray[np.int32]:
    return group.rollouts[0].turns[0].context_token_ids


def _rows(end: int, group: RolloutGroup) -> range:
    return range(end - len(group.rollouts), end)


def _told(values: Sequence[float], form: str) -> list[float | None]:
    """Return the values with the digits that readers need, to keep records small."""
    return [float(form % value) if math.isfinite(value) else None for value in values]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
