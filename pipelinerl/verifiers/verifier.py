"""`Verifier` and `GroupVerifier`: judge a model's answers, one at a time or the answers of a group.

A wrong answer is `wrong`. A verifier that fails or runs out of time reports `verifier_error` or `timeout`. Such
rollouts are masked: an error of ours must never teach the model that its answer was bad. A verdict comes within the
verifier's deadline, which starts when judging of the answer starts (`worker_pool.py` bounds the wait before that). The
event loop is never blocked for more than a few milliseconds. Answers are judged concurrently: a slow answer delays
neither its siblings nor other groups.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, final, runtime_checkable

from pipelinerl.types import MOST_SHOWN, Outcome, Problem, RewardPart, Verdict

#: Tolerance for a sum of rewards that misses `correct_at` only through rounding.
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
    """Judges single answers. A user's class with this method and without constructor arguments may serve as a
    verifier.
    """

    async def verify(self, problem: Problem, completion_text: str) -> Verdict:
        """Judge `completion_text`, the whole answer without the end-of-turn token; never raise for an answer."""
        ...


@runtime_checkable
class FastPathVerifier(Protocol):
    """A verifier that can give most of its verdicts without waiting."""

    def at_once(self, problem: Problem, completion_text: str) -> Verdict | None:
        """Return the verdict of `verify`, or None if that would block the event loop for too long."""
        ...


class GroupVerifier(Protocol):
    """Judges the answers of a domain, a group at a time."""

    async def judge(self, problem: Problem, answers: Sequence[SampledAnswer]) -> list[Judgement]:
        """Judge the answers to `problem`, in order; never raise for an answer."""
        ...

    async def close(self) -> None:
        """Stop everything that the verifier has started; it is not used afterwards."""
        ...


@runtime_checkable
class Startable(Protocol):
    """A verifier with a slow startup, for example one whose workers import heavy libraries."""

    async def start(self) -> None:
        """Do in advance what the first answer would otherwise wait for. A failure is reported when that answer is
        judged.
        """
        ...


async def start(verifier: object) -> None:
    """Start a verifier, if it is `Startable`."""
    if isinstance(verifier, Startable):
        await verifier.start()


@final
class PerAnswerVerifier:
    """Judges the answers of a group by a `Verifier`, concurrently; a task that exceeds `deadline_s` is cancelled.

    `deadline_s` is None for a verifier that enforces a deadline itself. A verdict of the fast path needs no task, and
    is computed once for equal answers.
    """

    def __init__(self, verifier: Verifier, *, deadline_s: float | None = None) -> None:
        self._verifier = verifier
        self._quick = verifier if isinstance(verifier, FastPathVerifier) else None
        self._deadline_s = deadline_s

    async def judge(self, problem: Problem, answers: Sequence[SampledAnswer]) -> list[Judgement]:
        """Judge all answers concurrently."""
        texts = [answer.text for answer in answers]
        known = {} if self._quick is None else _judged_at_once(self._quick, problem, texts)
        later = [text for text in texts if text not in known]
        if not later:
            return [known[text] for text in texts]
        waited = iter(await asyncio.gather(*(self._judged(problem, text) for text in later)))
        return [known[text] if text in known else next(waited) for text in texts]

    async def start(self) -> None:
        """Start the verifier, if it has `start`."""
        await start(self._verifier)

    async def close(self) -> None:
        """Close the verifier, if it has `close`."""
        close = getattr(self._verifier, "close", None)
        if close is not None:
            await close()

    async def _judged(self, problem: Problem, text: str) -> Judgement:
        began = time.monotonic()
        try:
            if self._deadline_s is None:
                verdict = await self._verifier.verify(problem, text)
            else:
                async with asyncio.timeout(self._deadline_s):
                    verdict = await self._verifier.verify(problem, text)
        except TimeoutError:
            verdict = timed_out(time.monotonic() - began)
        return Judgement(verdict, time.monotonic() - began)


def _judged_at_once(verifier: FastPathVerifier, problem: Problem, texts: Sequence[str]) -> dict[str, Judgement]:
    """Return the verdicts of the fast path, by answer."""
    judgements: dict[str, Judgement] = {}
    for text in dict.fromkeys(texts):
        began = time.monotonic()
        if (verdict := verifier.at_once(problem, text)) is not None:
            judgements[text] = Judgement(verdict, time.monotonic() - began)
    return judgements


def wrong(reason: str, *, answer: str = "") -> Verdict:
    """Return a verdict for an answer that was judged and is wrong."""
    return Verdict(outcome=Outcome.WRONG, reward=0.0, reason=shown(reason), answer=shown(answer))


def correct(answer: str) -> Verdict:
    """Return a verdict for a right answer; `answer` is its normalised form, the same for all equal answers."""
    return Verdict(outcome=Outcome.CORRECT, reward=1.0, answer=shown(answer))


def graded(reward: float, correct_at: float) -> Outcome:
    """Return the outcome of a graded reward: correct from `correct_at` on, partial above 0, else wrong."""
    if reward >= correct_at - ROUNDING:
        return Outcome.CORRECT
    return Outcome.PARTIAL if reward > 0 else Outcome.WRONG


def failed(reason: str) -> Verdict:
    """Return a verdict for a failure of the verifier itself."""
    return Verdict(outcome=Outcome.VERIFIER_ERROR, reward=0.0, reason=shown(reason))


def shown(text: str) -> str:
    """Return the text cut to a maximum length, with lone surrogates replaced, so that a record can hold it."""
    return text[:MOST_SHOWN].encode("utf-8", "replace").decode()


def last_tagged(text: str) -> str | None:
    """Return the content of the last `<answer>` tags, if any; in one pass, however long the text is."""
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return None if begin < 0 else text[begin + len("<answer>") : end]


def timed_out(seconds: float) -> Verdict:
    """Return a verdict for an answer that was not judged in time."""
    return Verdict(outcome=Outcome.TIMEOUT, reward=0.0, reason=f"no judgement within {seconds:g} s")


@dataclass(frozen=True, slots=True)
class WeightedPart:
    """One part of the sum, and its weight."""

    name: str
    weight: float
    verifier: GroupVerifier


@final
class WeightedSum:
    """Judges answers by all of its parts, concurrently.

    An answer has a reward only if every part has judged it. It is correct if the sum reaches `correct_at`, else partial
    if the sum is above 0. The parts' rewards are kept for metrics.
    """

    def __init__(self, parts: Sequence[WeightedPart], *, correct_at: float) -> None:
        self._parts = tuple(parts)
        self._correct_at = correct_at

    async def judge(self, problem: Problem, answers: Sequence[SampledAnswer]) -> list[Judgement]:
        """Run every part's verifier and combine their verdicts; the seconds are the sum over the parts."""
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
