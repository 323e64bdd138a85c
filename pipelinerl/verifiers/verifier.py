"""`Verifier` and `GroupVerifier`: judge what a model answered, one answer or the answers of a group. Both promise:

A wrong answer is `wrong`; a verifier that fails or runs out of time says so (`verifier_error`, `timeout`) and such
rollouts are masked: an error of ours must never teach the model that its answer was bad. A verdict comes within the
verifier's deadline, counted from when an answer's turn has come (`worker_pool.py` bounds how long that takes), and the
event loop is not blocked for longer than a few milliseconds. Answers are judged beside one another: one that takes long
holds up neither its siblings nor other groups.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol, final, runtime_checkable

from pipelinerl.types import MOST_SHOWN, Outcome, Problem, Verdict

#: A sum of rewards may miss `correct_at` by so much and reach it nevertheless.
ROUNDING: Final = 1e-9


class SampledAnswer(NamedTuple):
    """One answer as an engine gave it: `text` without the end-of-turn token, and why it ended."""

    text: str
    token_ids: Sequence[int] = ()
    finish_reason: str = "stop"


class Judgement(NamedTuple):
    """A verdict, and the seconds in which it was reached."""

    verdict: Verdict
    seconds: float


class Verifier(Protocol):
    """One kind of judgement, of one answer. A user's class without arguments that has this method may stand for it."""

    async def verify(self, problem: Problem, completion_text: str) -> Verdict:
        """Judge `completion_text`, the whole answer without the end-of-turn token. Never raises for an answer."""
        ...


@runtime_checkable
class FastPathVerifier(Protocol):
    """A verifier that need not wait for most of its verdicts."""

    def at_once(self, problem: Problem, completion_text: str) -> Verdict | None:
        """What `verify` would find, the same for the same answer; None where that takes longer than an event loop may
        be held up."""
        ...


class GroupVerifier(Protocol):
    """What a domain's answers are judged by."""

    async def judge(self, problem: Problem, answers: Sequence[SampledAnswer]) -> list[Judgement]:
        """Judge the answers to `problem`, in their order. Never raises for an answer."""
        ...

    async def close(self) -> None:
        """End what it has started; nothing is judged afterwards."""
        ...


@runtime_checkable
class Startable(Protocol):
    """A verifier that takes its time to come up, as one does whose workers import heavy libraries."""

    async def start(self) -> None:
        """Bring up what the first answer would wait for. What fails is told by that answer."""
        ...


async def start(verifier: object) -> None:
    """Start a verifier, if it can be."""
    if isinstance(verifier, Startable):
        await verifier.start()


@final
class PerAnswerVerifier:
    """Judges the answers of a group with a `Verifier`, all at once; each has `deadline_s`, kept by cancelling.

    A verifier that keeps a deadline of its own is given none here. What it can say at once needs no task, and is asked
    once of answers that are alike.
    """

    def __init__(self, verifier: Verifier, *, deadline_s: float | None = None) -> None:
        self._verifier = verifier
        self._quick = verifier if isinstance(verifier, FastPathVerifier) else None
        self._deadline_s = deadline_s

    async def judge(self, problem: Problem, answers: Sequence[SampledAnswer]) -> list[Judgement]:
        """Judge them beside one another."""
        texts = [answer.text for answer in answers]
        known = {} if self._quick is None else _judged_at_once(self._quick, problem, texts)
        later = [text for text in texts if text not in known]
        if not later:
            return [known[text] for text in texts]
        waited = iter(await asyncio.gather(*(self._judged(problem, text) for text in later)))
        return [known[text] if text in known else next(waited) for text in texts]

    async def start(self) -> None:
        """Start the verifier, if it can be."""
        await start(self._verifier)

    async def close(self) -> None:
        """Close the verifier, if it can be."""
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
    """By answer, what can be said of it without waiting."""
    found: dict[str, Judgement] = {}
    for text in dict.fromkeys(texts):
        began = time.monotonic()
        if (verdict := verifier.at_once(problem, text)) is not None:
            found[text] = Judgement(verdict, time.monotonic() - began)
    return found


def wrong(reason: str, *, answer: str = "") -> Verdict:
    """The answer was judged, and is not right."""
    return Verdict(outcome=Outcome.WRONG, reward=0.0, reason=shown(reason), answer=shown(answer))


def correct(answer: str) -> Verdict:
    """The answer, in the form in which equal ones are equal, is right."""
    return Verdict(outcome=Outcome.CORRECT, reward=1.0, answer=shown(answer))


def graded(reward: float, correct_at: float) -> Outcome:
    """What a reward between others means: correct from `correct_at` on, partial above 0, else wrong."""
    if reward >= correct_at - ROUNDING:
        return Outcome.CORRECT
    return Outcome.PARTIAL if reward > 0 else Outcome.WRONG


def failed(reason: str) -> Verdict:
    """The verifier itself failed."""
    return Verdict(outcome=Outcome.VERIFIER_ERROR, reward=0.0, reason=shown(reason))


def shown(text: str) -> str:
    """A text that a record can hold, whatever stands in an answer: cut, and without half characters."""
    return text[:MOST_SHOWN].encode("utf-8", "replace").decode()


def last_tagged(text: str) -> str | None:
    """What stands in the last `<answer>` tags, if any; in one pass, however long the text is."""
    end = text.rfind("</answer>")
    begin = text.rfind("<answer>", 0, max(end, 0))
    return None if begin < 0 else text[begin + len("<answer>") : end]


def timed_out(seconds: float) -> Verdict:
    """No judgement was reached in time."""
    return Verdict(outcome=Outcome.TIMEOUT, reward=0.0, reason=f"no judgement within {seconds:g} s")
