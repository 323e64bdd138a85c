"""`Verifier` and `GroupVerifier`: judge a model's answers, one at a time or the answers of a group.

A verifier that fails or runs out of time reports `verifier_error` or `timeout`. Such rollouts are masked: an error of
ours must never teach the model that its answer was wrong. The deadline starts when judging of the answer starts
(`worker_pool.py` bounds the wait before that). Verifiers do not block the event loop for more than a few milliseconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

from pipelinerl.system.returned_values import shown as shown  # other verifiers import it from here
from pipelinerl.types import Outcome, Problem, RewardPart, Verdict
from pipelinerl.verifiers.worker_pool import stopwatch

#: Tolerance for the comparison of rewards with thresholds.
ROUNDING: Final = 1e-9


class SampledAnswer(NamedTuple):
    """One sampled answer: `text` without the end-of-turn token, and its finish reason."""

    text: str
    token_ids: Sequence[int] = ()
    finish_reason: str = "stop"


class Judgement(NamedTuple):
    """A verdict, and the seconds that it took."""

    verdict: Verdict
    seconds: float


class Verifier(Protocol):
    """Judges single answers. A user's class with a method `verify` and no constructor arguments can be a verifier.

    It may also have `async start()`, for a slow startup before the first answer, and `async close()`. A built-in
    verifier may also have `at_once(problem, completion_text)`, which returns the verdict of `verify`, or None if
    judging would block the event loop for too long.
    """

    async def verify(self, problem: Problem, completion_text: str) -> Verdict:
        """Judge `completion_text`, the whole answer without the end-of-turn token, without raising for any answer."""
        ...


class GroupVerifier(Protocol):
    """Judges the answers of a domain, a group at a time. It may have a method `start`, as a `Verifier` may."""

    async def judge(self, problem: Problem, answers: Sequence[SampledAnswer]) -> list[Judgement]:
        """Return the verdicts on answers to `problem`, in order, without raising for any answer."""
        ...

    async def close(self) -> None:
        """Stop everything that the verifier has started."""
        ...


class VerdictServices(Protocol):
    """Verifier services: other processes that judge the answers of actors."""

    def update(self, leases: Sequence[Any]) -> None:
        """Use these services from now on, as the controller lists them (`VerifierLease`)."""
        ...

    def verifier(self, domain: str, rules: str) -> GroupVerifier:
        """Return the verifier of a domain that is judged by `rules`, a digest."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


class BudgetShare(NamedTuple):
    """One process's share of what a run may spend on judging.

    `folder` is where the process records its spending, and `sharers` the number of processes that divide the budget.
    """

    folder: Path
    sharers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierContext:
    """The settings that a verifier gets from its domain, apart from its own options.

    Attributes:
        domain: the domain's name.
        correct_at: the lowest reward with which an answer counts as correct.
        deadline_s: time limit for judging one answer.
        workers: number of worker processes; None for the verifier's default.
        budget: this process's share of the run's budget; None if it may spend the whole.
    """

    domain: str
    correct_at: float = 1.0
    deadline_s: float = 10.0
    workers: int | None = None
    budget: BudgetShare | None = None

    @property
    def where(self) -> str:
        """The domain's key in the recipe, for messages."""
        return f"domains.{self.domain}"


async def start(verifier: object) -> None:
    """Start a verifier, if it has `start`; a failure is reported when the first answer is judged."""
    if hasattr(verifier, "start"):
        await verifier.start()


async def close(verifier: Verifier) -> None:
    """Close a verifier, if it has `close`."""
    if hasattr(verifier, "close"):
        await verifier.close()


class PerAnswerVerifier:
    """Judges the answers of a group by a `Verifier`, concurrently; a verdict that takes over `deadline_s` is cancelled.

    `deadline_s` is None for a verifier that enforces a deadline itself. If the verifier has a method `at_once`, that
    method is tried first, once for each distinct text.
    """

    def __init__(self, verifier: Verifier, *, deadline_s: float | None = None) -> None:
        self._verifier = verifier
        self._deadline_s = deadline_s

    async def judge(self, problem: Problem, answers: Sequence[SampledAnswer]) -> list[Judgement]:
        texts = [answer.text for answer in answers]
        known: dict[str, Judgement] = {}
        if hasattr(self._verifier, "at_once"):
            for text in dict.fromkeys(texts):
                began = time.monotonic()
                if (verdict := self._verifier.at_once(problem, text)) is not None:
                    known[text] = Judgement(verdict, time.monotonic() - began)
        later = [text for text in texts if text not in known]
        if not later:
            return [known[text] for text in texts]
        waited = iter(await asyncio.gather(*(self._judged(problem, text) for text in later)))
        return [known[text] if text in known else next(waited) for text in texts]

    async def start(self) -> None:
        await start(self._verifier)

    async def close(self) -> None:
        await close(self._verifier)

    async def _judged(self, problem: Problem, text: str) -> Judgement:
        lapse = stopwatch()
        try:
            async with asyncio.timeout(self._deadline_s):
                verdict = await self._verifier.verify(problem, text)
        except TimeoutError:
            verdict = timed_out(lapse())
        return Judgement(verdict, lapse())


def wrong(reason: str, *, answer: str = "") -> Verdict:
    """Return the verdict on a wrong answer."""
    return Verdict(outcome=Outcome.WRONG, reward=0.0, reason=shown(reason), answer=shown(answer))


def correct(answer: str) -> Verdict:
    """Return the verdict on a right answer; `answer` is its normalised form, the same for all equal answers."""
    return Verdict(outcome=Outcome.CORRECT, reward=1.0, answer=shown(answer))


def graded(reward: float, correct_at: float) -> Outcome:
    """Return the outcome for a reward: correct if it is at least `correct_at`, else partial if above 0, else wrong."""
    if reward >= correct_at - ROUNDING:
        return Outcome.CORRECT
    return Outcome.PARTIAL if reward > 0 else Outcome.WRONG


def failed(reason: str) -> Verdict:
    """Return the verdict for a failure of the verifier itself."""
    return Verdict(outcome=Outcome.VERIFIER_ERROR, reward=0.0, reason=shown(reason))


def last_tagged(text: str) -> str | None:
    """Return the content of the last `<answer>` tags, or None; takes time linear in the text's length."""
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return None if begin < 0 else text[begin + len("<answer>") : end]


def timed_out(seconds: float) -> Verdict:
    """Return the verdict on an answer that was not judged in time."""
    return Verdict(outcome=Outcome.TIMEOUT, reward=0.0, reason=f"no judgement within {seconds:g} s")


@dataclass(frozen=True, slots=True)
class WeightedPart:
    """One part of a `WeightedSum`, with its weight."""

    name: str
    weight: float
    verifier: GroupVerifier


class WeightedSum:
    """Verifier whose reward is a weighted sum over other verifiers, its parts.

    An answer has a reward only if every part has judged it. It is correct if the sum reaches `correct_at`, else partial
    if the sum is above 0. The verdict keeps the parts' rewards for metrics.
    """

    def __init__(self, parts: Sequence[WeightedPart], *, correct_at: float) -> None:
        self._parts = tuple(parts)
        self._correct_at = correct_at

    async def judge(self, problem: Problem, answers: Sequence[SampledAnswer]) -> list[Judgement]:
        """Judge by all parts concurrently and combine their verdicts; the seconds are summed over the parts."""
        judged = await asyncio.gather(*(part.verifier.judge(problem, answers) for part in self._parts))
        return [self._sum(judgements) for judgements in zip(*judged, strict=True)]

    async def start(self) -> None:
        await asyncio.gather(*(start(part.verifier) for part in self._parts))

    async def close(self) -> None:
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
