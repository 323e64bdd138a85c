"""Verifier for the final answer of a mathematical problem, by its text, its exact value, or its mathematics.

The files beside this one find the final answer, read structures and rational numbers, and compare the remaining
expressions with the parser of math-verify. Expressions are compared in worker processes (`open_comparison`): parsing
and evaluating cannot be interrupted, so only killing a process enforces a deadline. A verdict's `answer` is the normal
form of the answer.

An answer may crash the parser, or keep it busy until the deadline. Such an answer is wrong if the ground truth can be
compared with itself in time: masking it would let a model escape problems that it cannot solve. If the comparison was
late only because it waited for a processor, the verdict is a `timeout`. If the ground truth itself cannot be parsed,
only an answer with its text is judged.
"""

from __future__ import annotations

import logging
import math
import resource
from collections.abc import Callable
from typing import Final

from pipelinerl.errors import RecipeError
from pipelinerl.plugins.math_answer.final_answer import final_answer, reference_answer
from pipelinerl.plugins.math_answer.notation import normal_form
from pipelinerl.plugins.math_answer.structures import equal
from pipelinerl.types import Problem, Verdict
from pipelinerl.verifiers.verifier import (
    GroupVerifier,
    PerAnswerVerifier,
    VerifierContext,
    correct,
    failed,
    timed_out,
    wrong,
)
from pipelinerl.verifiers.worker_pool import Overran, WorkerLost, WorkerPool

#: Longest answer that is read, in characters.
_MAX_ANSWER_CHARS: Final = 2000
#: Longest answer that the event loop compares by more than its text.
_QUICK_CHARS: Final = 300
#: If a comparison misses the deadline, its answer is wrong if the comparison used this share of it in processor time.
_SHARE_SPENT: Final = 0.5
#: Number of characters of an answer that a verdict shows.
_SHOWN: Final = 200


class _Undecided(Exception):
    """Only the mathematical comparison can decide whether the answer is right."""


class MathAnswer:
    """Verifier for problems whose ground truth is a number, an expression or several, in LaTeX or plain text."""

    def __init__(self, *, deadline_s: float = 5.0, workers: int | None = None) -> None:
        self._deadline_s = deadline_s
        self._pool = WorkerPool(
            "pipelinerl.plugins.math_answer.verifier:open_comparison", workers=workers, deadline_s=deadline_s
        )

    async def verify(self, problem: Problem, completion_text: str) -> Verdict:
        verdict = self.at_once(problem, completion_text)
        if verdict is not None:
            return verdict
        gold, given = reference_answer(problem.ground_truth), final_answer(completion_text)
        try:
            result = await self._pool.ask([gold, given], group=problem.problem_id)
        except Overran as overran:
            if _SHARE_SPENT * self._deadline_s <= overran.cpu_s < math.inf and await self._is_comparable(gold):
                return wrong(f"comparing the answer took more than {overran.cpu_s:.1f} s", answer=_short(given))
            return timed_out(self._deadline_s)
        except WorkerLost as error:
            return failed(f"math-verify: {error}")
        if result is None:
            return failed(f"math-verify cannot read the ground truth {gold[:80]!r}; write it as a number or in LaTeX")
        return _judged(gold, given, result)

    def at_once(self, problem: Problem, completion_text: str) -> Verdict | None:
        """Return the verdict of texts and exact numbers, or None if the answer needs the mathematical comparison."""
        gold, given = reference_answer(problem.ground_truth), final_answer(completion_text)
        if len(given) > _MAX_ANSWER_CHARS:
            return wrong(f"the answer has {len(given)} characters", answer=given[:_SHOWN])
        shown, wanted = normal_form(given), normal_form(gold)
        if shown == wanted:
            return correct(wanted[:_SHOWN])
        if not shown:
            return wrong("no answer")
        try:
            if max(len(gold), len(given)) > _QUICK_CHARS:
                return None
            return _judged(gold, given, equal(gold, given, _undecided))
        except (_Undecided, RecursionError):
            return None

    async def start(self) -> None:
        """Start the first worker, so that the first answer does not wait for the library's import."""
        await self._pool.start()

    async def close(self) -> None:
        await self._pool.close()

    async def _is_comparable(self, gold: str) -> bool:
        try:
            return bool(await self._pool.ask([gold, gold]))
        except (TimeoutError, WorkerLost):
            return False


def _undecided(gold: str, given: str) -> bool:
    raise _Undecided


def _judged(gold: str, given: str, same: bool) -> Verdict:
    if same:  # all answers equal to the ground truth are reported in its form
        return correct(_short(gold))
    return wrong(f"{normal_form(given)[:80]} is not {normal_form(gold)[:80]}", answer=_short(given))


def _short(answer: str) -> str:
    return normal_form(answer)[:_SHOWN]


def refuse_unreadable(problem: Problem) -> None:
    """Raise `RecipeError` for a ground truth that cannot be compared with any answer."""
    gold = reference_answer(problem.ground_truth)
    if not normal_form(gold):
        raise RecipeError(
            f"the ground truth {problem.ground_truth!r:.80} is empty, but math_answer compares answers with it"
        )
    if len(gold) > 2 * _MAX_ANSWER_CHARS:
        raise RecipeError(
            f"the ground truth has {len(gold)} characters, and math_answer takes {2 * _MAX_ANSWER_CHARS} at most; give "
            "only the final answer"
        )


def boxed_reference(problem: Problem) -> str:
    r"""Return a right answer as models write it: the answer of the ground truth in `\boxed{…}`."""
    return rf"\boxed{{{reference_answer(problem.ground_truth)}}}"


_MEMORY_BYTES: Final = 2 << 30


def open_comparison(_: str) -> Callable[[list[str]], bool | None]:
    """Return the function that a worker runs: `[gold, given]` → whether the two answers are equal.

    The result is None if the ground truth cannot be compared even with itself. If only `given` breaks the comparison,
    the result is False; otherwise a model could learn to break it.
    """
    from pipelinerl.plugins.math_answer.expressions import FAILURES, WARM_UP, UnreadableReference, equal_expressions

    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))

    def compared(question: list[str]) -> bool | None:
        gold, given = question
        try:
            return equal(gold, given, equal_expressions)
        except UnreadableReference:
            return None
        except FAILURES:
            return False if given != gold and compared([gold, gold]) else None

    for pair in WARM_UP:
        compared(list(pair))
    return compared


def open_verifier(_: None, context: VerifierContext) -> GroupVerifier:
    """Return the verifier of a domain; its worker processes enforce the deadline."""
    return PerAnswerVerifier(MathAnswer(deadline_s=context.deadline_s, workers=context.workers))
