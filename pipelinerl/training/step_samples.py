"""The log of samples from training steps, for people to read; it does not influence training.

A few trained groups of each step are drawn by seed and step, so that the choice is unbiased and repeatable. The last
filtered group represents all groups that were filtered since the last step. Decoding, formatting and writing run on the
log's own thread.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipelinerl.observability.logs import without_secrets
from pipelinerl.observability.samples import (
    AnswerRecord,
    AnswerTokens,
    SampleGroup,
    SampleKind,
    SampleLog,
    TokenTexts,
    TurnRecord,
)
from pipelinerl.training.batch import Floats, TrainBatch
from pipelinerl.training.domain_metrics import MOST_OF_A_GROUP
from pipelinerl.training.step import Accumulated
from pipelinerl.types import ROOT, Rollout, RolloutGroup

T = TypeVar("T")

#: Function that decodes token ids to text, including special tokens.
Decode = Callable[[Sequence[int]], str]

#: Maximum number of filter reasons counted separately in a step, since a user's filter may give a new reason each time.
MOST_REASONS: Final = 20
OTHER_REASONS: Final = "other reasons"
#: Maximum number of different tokens whose texts are cached.
_MOST_TEXTS: Final = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class _Result:
    """A step's results for one rollout; the defaults are those of a rollout that was not in the step.

    `shaped` is the shaped reward, and `advantage` the mean advantage of the rollout's tokens; each is None if not
    finite. `trained` is True if the rollout was in a micro-batch of the step. Values of its sampled tokens are [] if
    unknown.
    """

    shaped: float | None = None
    advantage: float | None = None
    trained: bool = False
    advantages: Sequence[float] = ()
    logprobs: Sequence[float] = ()
    entropies: Sequence[float] = ()


class StepSamples:
    """Writer of some groups of each step to the sample log, and of an example of the groups that were filtered."""

    def __init__(self, log: SampleLog, decode: Decode, *, seed: int, groups_per_step: int) -> None:
        self.log = log
        self.decode = decode
        self.seed = seed
        self.groups_per_step = groups_per_step
        self._texts: dict[int, str] = {}
        self._filtered: Counter[str] = Counter()
        self._example: tuple[RolloutGroup, str] | None = None

    def note_filtered(self, groups: Sequence[RolloutGroup], why: str) -> None:
        for group in groups:
            self._filtered[why if why in self._filtered or len(self._filtered) < MOST_REASONS else OTHER_REASONS] += 1
            self._example = (group, why)

    def write(self, accumulated: Accumulated) -> None:
        """Write some groups of a step that was applied, and the example of the groups that were filtered before it."""
        batch, now = accumulated.batch, time.time()
        results = _results(accumulated)
        picked = [
            (batch.groups[number], [results(row) for row in np.flatnonzero(batch.scored.groups == number).tolist()])
            for number in sorted(batch.drawn(self.seed, self.groups_per_step))
        ]
        counts, example = dict(self._filtered), self._example
        self._filtered, self._example = Counter(), None

        def records() -> Iterator[SampleGroup]:
            for group, answers in picked:
                yield self._group(SampleKind.TRAINED, group, batch.producing, answers, now)
            if example is not None:
                group, why = example
                unknown = [_Result()] * len(group.rollouts)
                yield self._group(SampleKind.FILTERED, group, batch.producing, unknown, now, why=why, counts=counts)

        self.log.put(records)

    def _group(
        self,
        kind: SampleKind,
        group: RolloutGroup,
        version: int,
        results: Sequence[_Result],
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
            tags=group.problem.tags[:MOST_OF_A_GROUP],
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

    def _answer(self, rollout: Rollout, version: int, prompt: NDArray[np.int32], result: _Result) -> AnswerRecord:
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
                (part.name, part.reward) for part in verdict.parts[:MOST_OF_A_GROUP] if math.isfinite(part.reward)
            ),
            shaped=result.shaped,
            advantage=result.advantage,
            length=rollout.num_sampled_tokens,
            finish_reason=rollout.finish_reason,
            spans=tuple((span.model_version, span.num_tokens) for turn in rollout.turns for span in turn.spans),
            staleness=version - rollout.oldest_version,
            trained=result.trained,
            tokens=self._columns(rollout, token_ids, result),
            turns=self._turns(rollout, prompt) if has_turns else (),
        )

    def _turns(self, rollout: Rollout, prompt: NDArray[np.int32]) -> tuple[TurnRecord, ...]:
        parents = rollout.parents or range(ROOT, len(rollout.turns) - 1)
        segment_of = {turn: number for number, each in enumerate(rollout.segments, 1) for turn in each.trained}

        def context(ids: NDArray[np.int32]) -> str:
            return "" if np.array_equal(ids, prompt) else self.decode(ids.tolist())

        return tuple(
            TurnRecord(
                context=context(turn.context_token_ids),
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

    def _columns(self, rollout: Rollout, token_ids: Sequence[int], result: _Result) -> AnswerTokens:
        gaps = [0, *(len(turn.context_token_ids) for turn in rollout.turns[1:])]
        counts = [len(turn.token_ids) for turn in rollout.turns]

        def spread(values: Sequence[T]) -> tuple[T | None, ...]:
            """Spread values of sampled tokens over all tokens of a turn, with None at tokens of the environment."""
            if len(counts) == 1 or not values:
                return tuple(values)
            rest = iter(values)
            parts = zip(gaps, counts, strict=True)
            return tuple(each for gap, count in parts for each in (*(None,) * gap, *islice(rest, count)))

        versions = [span.model_version for turn in rollout.turns for span in turn.spans for _ in range(span.num_tokens)]
        logprobs = [each for turn in rollout.turns for each in turn.behavior_logprobs.tolist()]
        deltas = [a - b for a, b in zip(result.logprobs, logprobs, strict=False)]
        return AnswerTokens(
            tokens=self._tokens(token_ids),
            versions=spread(versions),
            logprobs=spread(_rounded(logprobs, "%.7g")),
            deltas=spread(_rounded(deltas, "%.3g")),
            advantages=spread(_rounded(result.advantages, "%.4g")),
            entropies=spread(_rounded(result.entropies, "%.4g")),
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


def _results(accumulated: Accumulated) -> Callable[[int], _Result]:
    batch, entropies = accumulated.batch, accumulated.measured.of_tokens
    means, trained, advantages = mean_advantages(batch)
    logprobs = batch.sampled(accumulated.logprobs, missing=math.nan)
    ends = np.cumsum(batch.scored.lengths)

    def result(row: int) -> _Result:
        shaped, mean = _finite(batch.scored.rewards[row]), _finite(means[row])
        if not trained[row]:
            return _Result(shaped=shaped, advantage=mean)
        own = slice(ends[row] - batch.scored.lengths[row], ends[row])
        known = not np.isnan(logprobs[own]).any()
        return _Result(
            shaped=shaped,
            advantage=mean,
            trained=True,
            advantages=advantages[own].tolist(),
            logprobs=logprobs[own].tolist() if known else (),
            entropies=entropies[row].tolist() if row in entropies else (),
        )

    return result


def mean_advantages(batch: TrainBatch) -> tuple[Floats, NDArray[np.bool_], Floats]:
    """Return rollouts' mean advantages [B] (NaN: excluded), the mask [B] of trained ones, advantages [N]."""
    lengths, trained = batch.scored.lengths, np.zeros(len(batch.learns), bool)
    for number in range(len(batch.packed)):
        trained[batch.rollouts_of(number)] = True
    advantages = batch.sampled([each.advantages for each in batch.micro_batches])
    sums = np.bincount(np.repeat(np.arange(len(lengths)), lengths), advantages, minlength=len(lengths))
    return np.where(trained | batch.learns, sums / np.maximum(lengths, 1), np.nan), trained, advantages


def _rounded(values: Sequence[float], form: str) -> list[float | None]:
    """Round to the format `form`, to keep records small; None for values that are not finite."""
    return [float(form % value) if math.isfinite(value) else None for value in values]


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
