"""One evaluation: N held-out problems answered greedily, and the accuracy with its interval."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import final

from pipelinerl.messages import EvaluationDone


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """Accuracy over the judged problems, with the 95 % Wilson interval, and which weights answered."""

    model_version: int
    accuracy: float
    low: float
    high: float
    problems: int
    unjudged: int
    version_min: int
    version_max: int


@final
@dataclass(slots=True)
class Evaluation:
    """Collects answers until every problem has one, or failed."""

    model_version: int
    problems: int
    heard_at: float
    """When it began or last got an answer, on the controller's clock."""
    answers: dict[int, EvaluationDone | None] = field(default_factory=dict)

    def add(self, index: int, answer: EvaluationDone | None, *, now: float) -> None:
        """An answer, or None for a problem that failed; a repetition changes nothing."""
        self.heard_at = now
        self.answers.setdefault(index, answer)

    @property
    def complete(self) -> bool:
        """Has every problem ended?"""
        return len(self.answers) >= self.problems

    def result(self) -> EvaluationResult:
        """The figures so far."""
        done = [answer for answer in self.answers.values() if answer is not None]
        judged = [answer for answer in done if answer.judged]
        correct = sum(answer.correct for answer in judged)
        low, high = wilson_interval(correct, len(judged))
        return EvaluationResult(
            model_version=self.model_version,
            accuracy=correct / len(judged) if judged else 0.0,
            low=low,
            high=high,
            problems=self.problems,
            unjudged=self.problems - len(judged),
            version_min=min((answer.oldest_version for answer in done), default=self.model_version),
            version_max=max((answer.newest_version for answer in done), default=self.model_version),
        )


def wilson_interval(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval for a proportion (Wilson 1927); (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    p = successes / trials
    centre = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    return max(0.0, centre - half), min(1.0, centre + half)
