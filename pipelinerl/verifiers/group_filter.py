"""Filters of finished groups: a user's function decides whether a group is trained on.

    def keep(rewards, lengths):
        return max(lengths) < 900 or "an answer is too long"

A function receives those values of `OF_THE_GROUP` that its parameters name. If it returns True, the group is kept. If
it returns a text, the group is filtered for that reason; if it returns False, the reason is the function's name. Any
other result, or an exception, is a failure of the function: the group is filtered and counted as a failure.

Filters run in worker processes (`worker_pool.py`) and are killed at their deadline.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from pipelinerl.errors import RecipeError, UserError
from pipelinerl.system.references import last_line, load_reference, position_of
from pipelinerl.system.returned_values import described
from pipelinerl.types import MOST_SHOWN, Outcome, Problem, Verdict
from pipelinerl.verifiers.user_code import accepted_names, lacking, limit_memory, parameters_of
from pipelinerl.verifiers.verifier import Judgement, SampledAnswer, correct, failed, timed_out, wrong
from pipelinerl.verifiers.worker_pool import WorkerLost, WorkerPool

#: Maximum length of a reason in characters; groups are counted by reason.
_MOST_REASON: Final = 120
_OPENED: Final = "pipelinerl.verifiers.group_filter:open_filter_function"

_Value = Callable[[Problem, Sequence[SampledAnswer], Sequence[Verdict]], Any]


#: Arguments that a filter may have, by name: values of the problem, or lists with one entry for each answer.
OF_THE_GROUP: Final[Mapping[str, _Value]] = {
    "problem": lambda problem, answers, verdicts: problem,
    "domain": lambda problem, answers, verdicts: problem.domain,
    "prompt": lambda problem, answers, verdicts: [message._asdict() for message in problem.messages],
    "answer": lambda problem, answers, verdicts: problem.ground_truth,
    "ground_truth": lambda problem, answers, verdicts: problem.ground_truth,
    "metadata": lambda problem, answers, verdicts: dict(problem.metadata),
    "tags": lambda problem, answers, verdicts: list(problem.tags),
    "rewards": lambda problem, answers, verdicts: [
        verdict.reward if verdict.outcome.is_judgement else None for verdict in verdicts
    ],
    "correct": lambda problem, answers, verdicts: [verdict.outcome is Outcome.CORRECT for verdict in verdicts],
    "verdicts": lambda problem, answers, verdicts: list(verdicts),
    "completions": lambda problem, answers, verdicts: [answer.text for answer in answers],
    "lengths": lambda problem, answers, verdicts: [len(answer.token_ids) for answer in answers],
    "finish_reasons": lambda problem, answers, verdicts: [answer.finish_reason for answer in answers],
    "token_ids": lambda problem, answers, verdicts: [list(answer.token_ids) for answer in answers],
}
#: Types to which a worker converts these arguments from JSON; arguments not listed stay as they are.
_TYPES: Final[Mapping[str, Any]] = {"problem": Problem, "verdicts": list[Verdict]}


def filter_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names in `OF_THE_GROUP` that a filter accepts. Raises `RecipeError` if the function is unsuitable."""
    if inspect.iscoroutinefunction(function) or inspect.isclass(function):
        raise RecipeError("a filter must be a plain function, got one that is async, or a class")
    parameters = parameters_of(function)
    if missing := lacking(parameters, OF_THE_GROUP):
        raise RecipeError(f"a filter may take only the parameters {', '.join(OF_THE_GROUP)}; got {', '.join(missing)}")
    return accepted_names(parameters, OF_THE_GROUP)


def open_filter_function(reference: str) -> Callable[[Any], Any]:
    """Load a filter; return the function that a worker runs: arguments by name → verdict. Raises `UserError`."""
    function = load_reference(reference)
    place = position_of(function)
    limit_memory()

    def answering(values: dict[str, Any]) -> Any:
        for name in _TYPES.keys() & values.keys():
            values[name] = msgspec.convert(values[name], _TYPES[name])
        try:
            value = function(**values)
            verdict = verdict_on(value, name=getattr(function, "__name__", "the filter"))
        except BaseException as error:  # user code may raise anything
            verdict = failed(last_line(error, place))
        return msgspec.to_builtins(verdict)

    return answering


def verdict_on(value: Any, *, name: str) -> Verdict:
    """Convert a filter's return value to a verdict: `correct` keeps the group, `wrong` filters it.

    An invalid value gives a `verifier_error`.
    """
    if isinstance(value, str) and value.strip():
        return wrong(" ".join(str.__str__(value)[:MOST_SHOWN].split())[:_MOST_REASON])
    plain = value.item() if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () else value
    if plain is True:
        return correct("")
    if plain is False:
        return wrong(name[:_MOST_REASON])
    return failed(f"the filter must return True, False or a reason, it returned {described(value)}")


class GroupFilter:
    """Filter that applies the user's function `reference` to groups."""

    def __init__(self, reference: str, *, deadline_s: float, workers: int | None = None) -> None:
        """Check the function and create the workers. Raises `RecipeError` if it cannot be loaded or called."""
        try:
            self._names = filter_parameters(load_reference(reference))
        except UserError as error:
            raise RecipeError(f"curation.filter: {error}") from None
        self._deadline_s = deadline_s
        self._pool = WorkerPool(_OPENED, reference, workers=workers, deadline_s=deadline_s)

    async def start(self) -> None:
        await self._pool.start()

    async def judge(self, problem: Problem, answers: Sequence[SampledAnswer], verdicts: Sequence[Verdict]) -> Judgement:
        """Return `correct` for a group to train on, `wrong` for a filtered group, else a failure of the filter."""
        began = time.monotonic()
        values = {name: OF_THE_GROUP[name](problem, answers, verdicts) for name in self._names}
        try:
            answer = await self._pool.ask(msgspec.to_builtins(values), group=problem.problem_id)
            verdict = msgspec.convert(answer, Verdict)
        except TimeoutError:
            verdict = timed_out(self._deadline_s)
        except (WorkerLost, msgspec.ValidationError) as error:
            verdict = failed(str(error))
        return Judgement(verdict, time.monotonic() - began)

    async def close(self) -> None:
        await self._pool.close()


def refusal_of(verdict: Verdict) -> str:
    """Return the reason why a group with this verdict is not trained on; "" if it is trained on."""
    if verdict.outcome is Outcome.CORRECT:
        return ""
    return verdict.reason if verdict.outcome is Outcome.WRONG else f"curation.filter failed: {verdict.outcome}"
