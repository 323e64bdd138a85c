"""Verdicts from user code and from verifiers: the boundary before the actor.

    value of user code ─▶ verdict_of, verdicts_of ─▶ Verdict
    any `GroupVerifier` ─▶ judged ─▶ one `Judgement` per answer

A value that cannot be used gives a `verifier_error`, whose reason names the code that returned it, so that the answer
is masked. So does an exception of a verifier. `system/returned_values.py` says which values can be used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Final

from pipelinerl.system.references import last_line
from pipelinerl.system.returned_values import EXPECTED, NotAReward, NotAVerdict, described, plain_verdict, reward_of
from pipelinerl.types import Problem, Verdict
from pipelinerl.verifiers.verifier import GroupVerifier, Judgement, SampledAnswer, failed, graded

log = logging.getLogger("pipelinerl")

#: Largest reward of the project's own verifiers, since a weighted sum may exceed that of one function.
_MOST_SUM: Final = 1e9


def verdict_of(value: object, *, correct_at: float, place: str = "the function") -> Verdict:
    """Convert a return value to a verdict, which is `correct` if the reward is at least `correct_at`.

    None or an unusable value gives a `verifier_error`, whose reason begins with `place`, the code that returned it.
    """
    if isinstance(value, Verdict):
        return checked(value, place=place)
    if value is None:
        return failed(f"{place} judged nothing: it returned None")
    try:
        reward = reward_of(value)
    except NotAReward as error:
        return failed(f"{place} must return {EXPECTED}, it returned {error}")
    return Verdict(outcome=graded(reward, correct_at), reward=reward)


def verdicts_of(value: Any, count: int, *, correct_at: float, place: str = "the function") -> list[Verdict]:
    """Convert the return value of a function that judges a group to `count` verdicts, one for each answer."""
    try:
        values = value if isinstance(value, list | tuple) else value.tolist()
        values = list(values) if isinstance(values, list | tuple) else None
    except BaseException:  # methods of a user's object may raise anything
        values = None
    if values is None or len(values) != count:
        came = described(value) if values is None else f"{len(values)} of them"
        reason = f"{place} must return a list with one reward for each of {count} answers, it returned {came}"
        return [failed(reason)] * count
    return [verdict_of(each, correct_at=correct_at, place=place) for each in values]


def checked(verdict: Verdict, *, place: str) -> Verdict:
    """Return a user's `Verdict` with plain and bounded fields, or a `verifier_error` that begins with `place`."""
    try:
        return plain_verdict(verdict)
    except NotAVerdict as error:
        return failed(f"{place}: {error}")


async def judged(verifier: GroupVerifier, problem: Problem, answers: Sequence[SampledAnswer]) -> list[Judgement]:
    """Judge the answers, and mask all of them if the verifier raises or returns an unusable value.

    A failing verifier is logged with its traceback. The reasons name it, so that a run that it stops can say why.
    """
    name, began = type(verifier).__name__, time.monotonic()
    try:
        judgements = await verifier.judge(problem, answers)
        if len(judgements) != len(answers):
            raise ValueError(f"it returned {len(judgements)} verdicts on {len(answers)} answers")
        return [Judgement(plain_verdict(verdict, most=_MOST_SUM), float(seconds)) for verdict, seconds in judgements]
    except Exception as error:
        log.exception("the verifier %s failed on problem %s", name, problem.problem_id)
        verdict = failed(f"the verifier {name} failed: {last_line(error)}")
        return [Judgement(verdict, (time.monotonic() - began) / max(1, len(answers)))] * len(answers)
