"""A reward that is a weighted sum of parts. Each part judges every answer, and its reward is kept for metrics.

An answer has a reward only if every part has judged it. It is correct if the sum reaches `correct_at`, else partial if
the sum is above 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from pipelinerl.types import Problem, RewardPart, Verdict
from pipelinerl.verifiers.verifier import GroupVerifier, Judgement, SampledAnswer, graded, start


@dataclass(frozen=True, slots=True)
class WeightedPart:
    """One part of the sum, and its weight."""

    name: str
    weight: float
    verifier: GroupVerifier


@final
class WeightedSum:
    """Judges answers by all of its parts, concurrently."""

    def __init__(self, parts: Sequence[WeightedPart], *, correct_at: float) -> None:
        self._parts = tuple(parts)
        self._correct_at = correct_at

    async def judge(self, problem: Problem, answers: Sequence[SampledAnswer]) -> list[Judgement]:
        """Judge by every part; a judgement's seconds are the sum over the parts."""
        judged = await asyncio.gather(*(part.verifier.judge(problem, answers) for part in self._parts))
        return [self._sum(judgements) for judgements in zip(*judged, strict=True)]

    async def start(self) -> None:
        """Start every part that has `start`."""
        await asyncio.gather(*(start(part.verifier) for part in self._parts))

    async def close(self) -> None:
        """Close every part."""
        for part in self._parts:
            await part.verifier.close()

    def _sum(self, judgements: Sequence[Judgement]) -> Judgement:
        seconds = sum(judgement.seconds for judgement in judgements)
        verdicts = [(part, judgement.verdict) for part, judgement in zip(self._parts, judgements, strict=True)]
        for part, verdict in verdicts:
            if not verdict.outcome.is_judgement:
                return Judgement(
                    Verdict(outcome=verdict.outcome, reward=0.0, reason=f"{part.name}: {verdict.reason}"), seconds
                )
        reward = sum(part.weight * verdict.reward for part, verdict in verdicts)
        verdict = Verdict(
            outcome=graded(reward, self._correct_at),
            reward=reward,
            reason="; ".join(f"{part.name}: {verdict.reason}" for part, verdict in verdicts if verdict.reason),
            answer=next((verdict.answer for _, verdict in verdicts if verdict.answer), ""),
            parts=tuple(RewardPart(part.name, verdict.reward) for part, verdict in verdicts),
        )
        return Judgement(verdict, seconds)
