"""Verifier by reasoning-gym's own scorers: only an answer with the full score is correct, with reward 1.

Tasks whose scorer would run the answer as code are rejected. Scorers that turn out slow run in a worker process with a
deadline, and so does any scorer if the answer is much longer than the true answer. Other scorers run in the caller's
process, since a worker costs several times as much as a fast scorer. Slowness is measured in processor time, because
elapsed time is also long on a busy machine. Processor time is read, by a system call, only for a scorer whose elapsed
time was long. If the scorer fails on an answer but gives the true answer the full score, the answer is wrong.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Final

from pipelinerl.errors import RecipeError
from pipelinerl.system import gym_tasks
from pipelinerl.types import Problem, Verdict
from pipelinerl.verifiers.verifier import (
    GroupVerifier,
    PerAnswerVerifier,
    VerifierContext,
    correct,
    failed,
    last_tagged,
    timed_out,
    wrong,
)
from pipelinerl.verifiers.worker_pool import WorkerLost, WorkerPool

#: Tasks whose scorer passes the answer to eval, exec or sympy's parse_expr (which evaluates). A test searches the
#: library's source for other such tasks.
UNSAFE_TASKS: Final = frozenset(
    {
        "binary_matrix", "codeio", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication",
        "puzzle24", "simple_integration", "spiral_matrix", "string_insertion",
    }
)  # fmt: skip

#: A scoring that takes at most this many processor seconds may run on the event loop.
_QUICK_S: Final = 0.002
#: A scorer is slow after this many consecutive scorings above `_QUICK_S`, or one above `_LONG_S`. A single scoring may
#: be slow because it fills caches or triggers the garbage collector.
_NOT_QUICK: Final = 3
_LONG_S: Final = 0.05
#: An answer is scored by a worker if it is longer than the true answer times this factor, plus `_AND_SOME`: some
#: scorers take quadratic time.
_MUCH_LONGER: Final = 4
_AND_SOME: Final = 256
#: Number of characters of an answer that a verdict shows.
_SHOWN: Final = 200

Scorer = Callable[[int, str], float]


class ReasoningGym:
    """Verifier for problems of the source `reasoning_gym` (`data/generated.py`)."""

    def __init__(self, *, deadline_s: float = 5.0, workers: int | None = None) -> None:
        self._deadline_s = deadline_s
        self._scorers: dict[str, Scorer] = {}
        self._loading: dict[str, asyncio.Future[Scorer]] = {}
        self._slow: set[str] = set()
        self._doubted: set[str] = set()
        self._not_quick: Counter[str] = Counter()
        self._pool = WorkerPool(
            "pipelinerl.verifiers.reasoning_gym:open_scorers", workers=workers, deadline_s=deadline_s
        )

    async def verify(self, problem: Problem, completion_text: str) -> Verdict:
        """Judge by the task's scorer; a problem that does not come from reasoning-gym gives a `verifier_error`."""
        try:
            task, parameters, index = entry_of(problem)
            name = _scorer_name(task, parameters)
            if name not in self._scorers:
                self._scorers[name] = await self._loaded(name, task, parameters)
        except RecipeError as error:
            return failed(str(error))
        verdict = self.at_once(problem, completion_text)
        if verdict is not None:
            return verdict
        answer = extract_answer(completion_text)
        question = [name, index, answer, problem.ground_truth]
        try:
            return _verdict(await self._pool.ask(question, group=problem.problem_id), answer)
        except TimeoutError:
            return timed_out(self._deadline_s)
        except WorkerLost as error:
            return failed(f"reasoning-gym: {error}")

    async def _loaded(self, name: str, task: str, parameters: Mapping[str, Any]) -> Scorer:
        """Load a scorer on a thread, once for all answers that wait for it."""
        loading = self._loading.get(name)
        if loading is None:
            loading = self._loading[name] = asyncio.ensure_future(asyncio.to_thread(_scorer, task, parameters))
        try:
            return await asyncio.shield(loading)
        finally:
            if loading.done():
                self._loading.pop(name, None)

    def at_once(self, problem: Problem, completion_text: str) -> Verdict | None:
        """Return the verdict if the scorer is loaded and fast for this answer, else None."""
        try:
            task, parameters, index = entry_of(problem)
        except RecipeError as error:
            return failed(str(error))
        name = _scorer_name(task, parameters)
        scorer, answer = self._scorers.get(name), extract_answer(completion_text)
        if scorer is None or name in self._slow or len(answer) > _MUCH_LONGER * len(problem.ground_truth) + _AND_SOME:
            return None
        measured = name in self._doubted
        began, began_elapsed = time.thread_time() if measured else 0.0, time.perf_counter()
        verdict = _verdict(_scored(scorer, index, answer, problem.ground_truth), answer)
        if measured:
            seconds = time.thread_time() - began
            self._not_quick[name] = self._not_quick[name] + 1 if seconds > _QUICK_S else 0
            if seconds <= _QUICK_S:
                self._doubted.discard(name)
            if seconds > _LONG_S or self._not_quick[name] >= _NOT_QUICK:
                self._slow.add(name)
        elif time.perf_counter() - began_elapsed > _QUICK_S:
            self._doubted.add(name)
        return verdict

    async def close(self) -> None:
        await self._pool.close()


def extract_answer(completion_text: str) -> str:
    """Return the content of the last `<answer>` tags, else the whole text."""
    tagged = last_tagged(completion_text)
    return completion_text if tagged is None else tagged.strip()


def open_scorers(_: str) -> Callable[[Any], float | str]:
    """Return the function that a worker runs: `[name, index, answer, truth]` → score or error message."""
    scorers: dict[str, Scorer] = {}

    def answering(question: Any) -> float | str:
        name, index, answer, truth = question
        try:
            scorer = scorers.get(name) or scorers.setdefault(name, _scorer(*json.loads(name)))
        except RecipeError as error:
            return str(error)
        return _scored(scorer, index, answer, truth)

    return answering


def entry_of(problem: Problem) -> tuple[str, Mapping[str, Any], int]:
    """Return a problem's task, parameters and entry number. Raises `RecipeError` if the problem cannot be scored."""
    try:
        task, parameters, index = (problem.metadata[name] for name in ("task", "parameters", "index"))
    except KeyError as error:
        raise RecipeError(f"not a reasoning-gym problem: its metadata lacks {error}") from None
    _refuse_unsafe(task)
    return task, parameters, index


def _scorer_name(task: str, parameters: Mapping[str, Any]) -> str:
    return json.dumps([task, parameters], sort_keys=True)


def _refuse_unsafe(task: str) -> None:
    if task in UNSAFE_TASKS:
        raise RecipeError(f"reasoning-gym's scorer of {task} runs answers as code; choose another task")


def _scorer(task: str, parameters: Mapping[str, Any]) -> Scorer:
    _refuse_unsafe(task)
    try:
        dataset = gym_tasks.create_dataset(task, seed=0, size=2**31 - 1, **parameters)
    except (ValueError, TypeError, AssertionError) as error:
        raise RecipeError(f"reasoning-gym refuses task {task!r} with {dict(parameters)!r}: {error}") from error
    entry = lru_cache(maxsize=1)(dataset.__getitem__)  # the answers of a group are scored in sequence
    return lambda index, answer: float(dataset.score_answer(answer=answer, entry=entry(index)))


#: Exceptions that scorers raise on unexpected texts.
_FAILURES: Final = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RecursionError, SyntaxError, TypeError,
    ValueError,
)  # fmt: skip


def _scored(scorer: Scorer, index: int, answer: str, truth: str) -> float | str:
    """Return the score, or the scorer's error message; 0 if the scorer fails on this answer but not on the true one."""
    try:
        return scorer(index, answer)
    except _FAILURES as error:
        try:
            works = answer != truth and scorer(index, truth) >= 1.0
        except _FAILURES:
            works = False
        return 0.0 if works else f"the scorer failed on the answer: {type(error).__name__}: {error}"


def _verdict(score: float | str, answer: str) -> Verdict:
    if isinstance(score, str):
        return failed(score)
    stated = answer.strip()[:_SHOWN]
    return correct(stated) if score >= 1.0 else wrong(f"score {score:g}", answer=stated)


def open_verifier(_: None, context: VerifierContext) -> GroupVerifier:
    """Return the verifier of a domain; its worker processes enforce the deadline."""
    return PerAnswerVerifier(ReasoningGym(deadline_s=context.deadline_s, workers=context.workers))
