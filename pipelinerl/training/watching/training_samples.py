"""`TrainingSamples`: which groups of a step are kept for readers, and what is kept of them.

A few groups of each step are drawn by seed and step, so that nobody chooses them, and a run that is taken again shows
the same ones. Of the groups that were filtered since the step before, one stands for all. Everything but the draw, the
decoding too, is done on the log's thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
from numpy.typing import NDArray

from pipelinerl.observability.samples.record import AnswerRecord, SampleGroup, SampleKind
from pipelinerl.observability.samples.sample_log import SampleLog
from pipelinerl.rng import generator
from pipelinerl.types import Rollout, RolloutGroup

#: Text of token ids, special tokens included.
Decode = Callable[[Sequence[int]], str]

#: So many tags of a group are kept, and so many parts of a reward.
_MOST: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredGroups:
    """The groups that were filtered since the last step: how many for which reason, and the last of them."""

    counts: Mapping[str, int]
    example: RolloutGroup
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """What a step made of its rollouts, [B] each, group after group.

    Attributes:
        shaped: rewards that advantages were computed from. advantages: means over the tokens; NaN where there is none.
        trained: had it a gradient?
    """

    groups: Sequence[RolloutGroup]
    shaped: NDArray[np.float64]
    advantages: NDArray[np.float64]
    trained: NDArray[np.bool_]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSamples:
    """Writes samples of the steps to a log."""

    log: SampleLog
    decode: Decode
    seed: int
    groups_per_step: int

    def write(self, version: int, step: StepRollouts, filtered: FilteredGroups | None) -> None:
        """Keep some groups of the step that made `version`, and what was filtered before it."""
        draw = generator(self.seed, "samples", version)
        chosen = draw.permutation(len(step.groups))[: self.groups_per_step].tolist()
        now = time.time()
        self.log.put(lambda: self._made(version, step, sorted(chosen), filtered, now))

    def _made(
        self, version: int, step: StepRollouts, chosen: Sequence[int], filtered: FilteredGroups | None, now: float
    ) -> Iterator[SampleGroup]:
        ends = np.cumsum([len(group.rollouts) for group in step.groups]).tolist()
        for number in chosen:
            group = step.groups[number]
            rows = range(ends[number] - len(group.rollouts), ends[number])
            answers = tuple(
                self._answer(
                    rollout,
                    version,
                    shaped=_finite(step.shaped[row]),
                    advantage=_finite(step.advantages[row]),
                    trained=bool(step.trained[row]),
                )
                for row, rollout in zip(rows, group.rollouts, strict=True)
            )
            yield self._group(SampleKind.TRAINED, group, version, answers, now)
        if filtered is not None:
            group = filtered.example
            answers = tuple(self._answer(rollout, version) for rollout in group.rollouts)
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
        return SampleGroup(
            kind=kind,
            step=version,
            time=now,
            group_id=group.group_id,
            domain=group.domain,
            problem_id=group.problem.problem_id,
            tags=group.problem.tags[:_MOST],
            prompt=self.decode(group.rollouts[0].turns[0].context_token_ids.tolist()),
            ground_truth=group.problem.ground_truth,
            answers=answers,
            why=why,
            filtered=dict(counts or {}),
        )

    def _answer(
        self,
        rollout: Rollout,
        version: int,
        *,
        shaped: float | None = None,
        advantage: float | None = None,
        trained: bool = False,
    ) -> AnswerRecord:
        verdict, (first, *later) = rollout.verdict, rollout.turns
        tokens = [first.token_ids, *(part for turn in later for part in (turn.context_token_ids, turn.token_ids))]
        return AnswerRecord(
            text=self.decode(np.concatenate(tokens).tolist()),
            outcome=verdict.outcome.value,
            reward=_finite(verdict.reward) if verdict.outcome.is_judgement else None,
            reason=verdict.reason,
            parts=tuple((part.name, part.reward) for part in verdict.parts[:_MOST] if math.isfinite(part.reward)),
            shaped=shaped,
            advantage=advantage,
            length=rollout.num_sampled_tokens,
            finish_reason=rollout.finish_reason,
            spans=tuple((span.model_version, span.num_tokens) for turn in rollout.turns for span in turn.spans),
            staleness=version - rollout.oldest_version,
            trained=trained,
        )


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
