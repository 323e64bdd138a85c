"""Judges with reasoning-gym's own scorer: correct iff it gives the full score. The reward is 1 or 0, no partial credit.

The answer is what stands in the last `<answer>` tags, else the whole text. Scorers that would run the answer as code
are refused. Quick scorers run where they are called; one that was slow once runs in a thread from then on, with a
deadline.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, final

from pipelinerl.system import gym_tasks
from pipelinerl.types import Problem, Verdict
from pipelinerl.verifiers.verifier import CORRECT, failed, timed_out, wrong

#: Tasks whose scorer passes the answer to eval, exec or sympy's parse_expr (which evaluates). A test greps the library.
UNSAFE_TASKS: Final = frozenset(
    {
        "binary_matrix", "codeio", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication",
        "puzzle24", "simple_integration", "spiral_matrix", "string_insertion",
    }
)  # fmt: skip

#: An event loop may be held up this long by one scoring.
_QUICK_S: Final = 0.002
_TAGGED: Final = re.compile(r"<answer>\s?(.*?)\s?</answer>", re.DOTALL)

Scorer = Callable[[int, str], float]


@final
class ReasoningGym:
    """Verifier for problems of `data/generated.py`."""

    def __init__(self, *, deadline_s: float = 5.0) -> None:
        self._deadline_s = deadline_s
        self._scorers: dict[str, Scorer] = {}
        self._slow: set[str] = set()

    async def verify(self, problem: Problem, completion_text: str) -> Verdict:
        """Judge by the task's scorer; a problem of another source is a `verifier_error`."""
        try:
            task, parameters, index = (problem.metadata[name] for name in ("task", "parameters", "index"))
        except KeyError as error:
            return failed(f"{problem.problem_id} is no reasoning-gym problem: its metadata lacks {error}")
        name = json.dumps([task, parameters], sort_keys=True)
        scorer = self._scorers.get(name)
        if scorer is None:
            try:
                scorer = self._scorers[name] = await asyncio.to_thread(_scorer, task, parameters)
            except _Refused as error:
                return failed(str(error))
        answer = extract_answer(completion_text)
        if name not in self._slow:
            began = time.monotonic()
            verdict = _judge(scorer, index, answer)
            if time.monotonic() - began > _QUICK_S:
                self._slow.add(name)
            return verdict
        try:
            return await asyncio.wait_for(asyncio.to_thread(_judge, scorer, index, answer), self._deadline_s)
        except TimeoutError:
            return timed_out(self._deadline_s)


def extract_answer(completion_text: str) -> str:
    """What stands in the last `<answer>` tags, else the whole text."""
    tagged = _TAGGED.findall(completion_text)
    return tagged[-1].strip() if tagged else completion_text


class _Refused(Exception):
    """The task cannot be scored."""


def _scorer(task: str, parameters: Mapping[str, Any]) -> Scorer:
    if task in UNSAFE_TASKS:
        raise _Refused(f"reasoning-gym's scorer of {task} runs answers as code; choose another task")
    try:
        dataset = gym_tasks.create_dataset(task, seed=0, size=2**31 - 1, **parameters)
    except (ValueError, TypeError, AssertionError) as error:
        raise _Refused(f"reasoning-gym refuses task {task!r} with {dict(parameters)!r}: {error}") from error
    # The G samples of a group are scored one after the other: the last entry is worth keeping.
    last: tuple[int, dict[str, Any]] = (-1, {})

    def score(index: int, answer: str) -> float:
        nonlocal last
        if last[0] != index:
            last = (index, dataset[index])
        return float(dataset.score_answer(answer=answer, entry=last[1]))

    return score


def _judge(scorer: Scorer, index: int, answer: str) -> Verdict:
    try:
        score = scorer(index, answer)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        return failed(f"the scorer failed on the answer: {type(error).__name__}: {error}")
    return CORRECT if score >= 1.0 else wrong(f"score {score:g}")
