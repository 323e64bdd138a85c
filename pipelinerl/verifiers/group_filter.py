"""Filters that are a user's plain functions: may a finished group train?

    def keep(rewards, lengths):
        return max(lengths) < 900 or "one ran on"

A function asks by name for what it wants of `OF_THE_GROUP`. True keeps the group; a text filters it for that reason,
and False for the function's name. Anything else, and an exception, is the function's failure: the group is filtered,
counted as such, and never trained by mistake.

It runs in worker processes (`worker_pool.py`), as rewards do, and is killed at its deadline.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, final

import msgspec

from pipelinerl.errors import RecipeError, UserError
from pipelinerl.system.references import last_line, load_reference
from pipelinerl.types import Outcome, Problem, Verdict
from pipelinerl.verifiers.asked_names import asked_names, lacking, parameters_of
from pipelinerl.verifiers.user_code import limit_memory
from pipelinerl.verifiers.verifier import Judgement, SampledAnswer, correct, failed, timed_out, wrong
from pipelinerl.verifiers.worker_pool import WorkerLost, WorkerPool

#: So many characters of a reason are kept: groups are counted by it.
_MOST_REASON: Final = 120
_OPENED: Final = "pipelinerl.verifiers.group_filter:open_filter_function"

_Value = Callable[[Problem, Sequence[SampledAnswer], Sequence[Verdict]], Any]


def _reward(verdict: Verdict) -> float | None:
    return verdict.reward if verdict.outcome.is_judgement else None


#: What a filter may ask for, by name: of the problem, then lists with an entry for each answer.
OF_THE_GROUP: Final[Mapping[str, _Value]] = {
    "problem": lambda problem, answers, verdicts: problem,
    "domain": lambda problem, answers, verdicts: problem.domain,
    "prompt": lambda problem, answers, verdicts: [message._asdict() for message in problem.messages],
    "answer": lambda problem, answers, verdicts: problem.ground_truth,
    "ground_truth": lambda problem, answers, verdicts: problem.ground_truth,
    "metadata": lambda problem, answers, verdicts: dict(problem.metadata),
    "tags": lambda problem, answers, verdicts: list(problem.tags),
    "rewards": lambda problem, answers, verdicts: [_reward(verdict) for verdict in verdicts],
    "correct": lambda problem, answers, verdicts: [verdict.outcome is Outcome.CORRECT for verdict in verdicts],
    "verdicts": lambda problem, answers, verdicts: list(verdicts),
    "completions": lambda problem, answers, verdicts: [answer.text for answer in answers],
    "lengths": lambda problem, answers, verdicts: [len(answer.token_ids) for answer in answers],
    "finish_reasons": lambda problem, answers, verdicts: [answer.finish_reason for answer in answers],
    "token_ids": lambda problem, answers, verdicts: [list(answer.token_ids) for answer in answers],
}
#: Those that are no plain data, with what a worker reads them as.
_TYPES: Final[Mapping[str, Any]] = {"problem": Problem, "verdicts": list[Verdict]}


def names_asked(function: Callable[..., Any]) -> tuple[str, ...]:
    """What of `OF_THE_GROUP` a function asks for.

    Raises:
        RecipeError: it asks for something else, or is async.
    """
    if inspect.iscoroutinefunction(function) or inspect.isclass(function):
        raise RecipeError("a filter must be a plain function, got one that is async, or a class")
    parameters = parameters_of(function)
    if missing := lacking(parameters, OF_THE_GROUP):
        raise RecipeError(
            f"a filter takes by name any of {', '.join(OF_THE_GROUP)}; {', '.join(missing)} is none of them"
        )
    return asked_names(parameters, OF_THE_GROUP)


def open_filter_function(reference: str) -> Callable[[Any], Any]:
    """A worker's function, see `worker_process`: the values by name → a verdict.

    Raises:
        UserError: the function cannot be loaded.
    """
    function = load_reference(reference)
    limit_memory()

    def answering(values: dict[str, Any]) -> Any:
        for name in _TYPES.keys() & values.keys():
            values[name] = msgspec.convert(values[name], _TYPES[name])
        try:
            found = function(**values)
        except (Exception, SystemExit) as error:  # whatever the user's code raises
            return msgspec.to_builtins(failed(last_line(error)))
        return msgspec.to_builtins(verdict_on(found, name=getattr(function, "__name__", "the filter")))

    return answering


def verdict_on(found: Any, *, name: str) -> Verdict:
    """What a filter's return value stands for: `correct` keeps the group, `wrong` filters it for its reason."""
    if isinstance(found, str) and found.strip():
        return wrong(" ".join(found.split())[:_MOST_REASON])
    plain = found.item() if type(found).__module__ == "numpy" and getattr(found, "shape", None) == () else found
    if plain is True:
        return correct("")
    if plain is False:
        return wrong(name[:_MOST_REASON])
    return failed(f"the filter must return True, False or a reason, it returned {type(found).__name__} {found!r:.80}")


@final
class GroupFilter:
    """Asks a user's function, which `reference` names, about groups."""

    def __init__(self, reference: str, *, deadline_s: float, workers: int | None = None) -> None:
        """Raises `RecipeError` for a function that cannot be called, `UserError` for one that cannot be loaded."""
        try:
            self._names = names_asked(load_reference(reference))
        except UserError as error:
            raise RecipeError(f"curation.filter: {error}") from None
        self._deadline_s = deadline_s
        self._pool = WorkerPool(_OPENED, reference, workers=workers, deadline_s=deadline_s)

    async def start(self) -> None:
        """Bring up what it runs in."""
        await self._pool.start()

    async def judge(self, problem: Problem, answers: Sequence[SampledAnswer], verdicts: Sequence[Verdict]) -> Judgement:
        """`correct` for a group that may train, `wrong` for one that is filtered, else how the filter has failed."""
        began = time.monotonic()
        values = {name: OF_THE_GROUP[name](problem, answers, verdicts) for name in self._names}
        try:
            answer = await self._pool.ask(msgspec.to_builtins(values), group=problem.problem_id)
            verdict = msgspec.convert(answer, Verdict)
        except TimeoutError:
            verdict = timed_out(self._deadline_s)
        except WorkerLost as error:
            verdict = failed(str(error))
        return Judgement(verdict, time.monotonic() - began)

    async def close(self) -> None:
        """End the workers."""
        await self._pool.close()


def refusal_of(verdict: Verdict) -> str:
    """Why a group with this finding does not train; empty for one that may."""
    if verdict.outcome is Outcome.CORRECT:
        return ""
    return verdict.reason if verdict.outcome is Outcome.WRONG else f"curation.filter failed: {verdict.outcome}"
