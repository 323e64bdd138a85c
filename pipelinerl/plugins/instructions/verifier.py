"""Verifier for instructions that a program can check (IFEval).

An answer is correct if it follows all instructions of its problem; a setting decides the reward for following only some
of them. The verdict's parts give the result of each instruction by id. The problem's metadata or ground truth lists its
instructions (`catalogue.py`); if there are none, or invalid ones, the verdict is a `verifier_error`.

Long answers, and languages whose detection needs a library, are checked in a worker process with a deadline. Other
answers are checked in the caller's process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec

from pipelinerl.errors import RecipeError
from pipelinerl.plugins.instructions import InstructionsSection
from pipelinerl.plugins.instructions.catalogue import Matching, Score, followed, instructions_of
from pipelinerl.plugins.instructions.instruction import Instruction, id_of
from pipelinerl.plugins.instructions.kinds import ResponseLanguage, is_slow_language, preload_languages
from pipelinerl.types import Problem, RewardPart, Verdict
from pipelinerl.verifiers.verifier import (
    GroupVerifier,
    PerAnswerVerifier,
    VerifierContext,
    failed,
    graded,
    shown,
    timed_out,
)
from pipelinerl.verifiers.worker_pool import WorkerLost, WorkerPool

#: An answer is checked on the event loop, which takes up to 5 ms, if characters · instructions is at most this number.
_QUICK_CHARS: Final = 10_000
#: Loose matching takes at most this many times as long as strict matching.
_LOOSE_COST: Final = 4


class InstructionFollowing:
    """Verifier for problems with instructions that a program can check."""

    def __init__(
        self,
        *,
        score: Score = Score.SHARE,
        matching: Matching = Matching.STRICT,
        deadline_s: float = 5.0,
        workers: int | None = None,
    ) -> None:
        self._score = score
        self._matching = matching
        self._deadline_s = deadline_s
        self._pool = WorkerPool(
            "pipelinerl.plugins.instructions.verifier:open_checks", workers=workers, deadline_s=deadline_s
        )

    async def verify(self, problem: Problem, completion_text: str) -> Verdict:
        try:
            instructions = instructions_of_problem(problem)
        except RecipeError as error:
            return failed(str(error))
        slow = any(isinstance(each, ResponseLanguage) and is_slow_language(each.language) for each in instructions)
        cost = len(completion_text) * len(instructions) * (_LOOSE_COST if self._matching is Matching.LOOSE else 1)
        if not slow and cost <= _QUICK_CHARS:
            return self._verdict(instructions, followed(instructions, completion_text, self._matching))
        question = [msgspec.to_builtins(problem.metadata), problem.ground_truth, completion_text, self._matching.value]
        try:
            return self._verdict(instructions, await self._pool.ask(question, group=problem.problem_id))
        except TimeoutError:
            return timed_out(self._deadline_s)
        except WorkerLost as error:
            return failed(f"instruction_following: {error}")

    async def close(self) -> None:
        await self._pool.close()

    def _verdict(self, instructions: Sequence[Instruction], done: Sequence[bool]) -> Verdict:
        by_id: dict[str, list[bool]] = {}
        for each, is_followed in zip(instructions, done, strict=True):
            by_id.setdefault(id_of(each), []).append(is_followed)
        reward = self._score.of(done)
        broken = ", ".join(id for id, results in by_id.items() if not all(results))
        return Verdict(
            outcome=graded(reward, correct_at=1.0),
            reward=reward,
            reason=shown(f"does not follow {broken}" if broken else ""),
            parts=tuple(RewardPart(id, sum(results) / len(results)) for id, results in by_id.items()),
        )


def open_verifier(section: InstructionsSection, context: VerifierContext) -> GroupVerifier:
    """Return the verifier of a domain; its worker processes enforce the deadline."""
    return PerAnswerVerifier(
        InstructionFollowing(
            score=section.score, matching=section.matching, deadline_s=context.deadline_s, workers=context.workers
        )
    )


def findings(_: InstructionsSection, problems: Iterable[Problem]) -> Iterator[str]:
    """Yield how often each instruction occurs; raise `RecipeError` for a problem whose instructions are invalid."""
    counts: Counter[str] = Counter()
    number = 0
    for problem in problems:
        number += 1
        try:
            counts.update(map(id_of, instructions_of_problem(problem)))
        except RecipeError as error:
            raise RecipeError(f"{problem.problem_id}: {error}") from None
    yield f"of {number} problems, {', '.join(f'{id} {count / number:.0%}' for id, count in counts.most_common())}"


def instructions_of_problem(problem: Problem) -> tuple[Instruction, ...]:
    """Return the problem's instructions. Raises `RecipeError` if there are none, or one is invalid."""
    return instructions_of(problem.metadata, problem.ground_truth)


def open_checks(_: str) -> Callable[[Any], list[bool]]:
    """Return the function that a worker runs: `[metadata, ground truth, answer, strict or loose]` → list of results."""
    preload_languages()

    def answering(question: Any) -> list[bool]:
        metadata, ground_truth, answer, matching = question
        return followed(instructions_of(metadata, ground_truth), answer, Matching(matching))

    return answering
