"""Rewards by users' plain functions: accepted signatures, calling conventions and return values.

    def score(problem, completion_text): …            one answer, by position
    def score(completion_text, answer, **_): …        one answer, by the names in `OF_ONE`
    def score(completions, answer, **kwargs): …       the answers of a group at once, by the names in `OF_A_GROUP`:
                                                      each a list with one entry for each answer, as in TRL

Any other name is a column of the data, from the problem's metadata, as in TRL. `**kwargs` gets all columns.

A function returns a number, a bool, a `Verdict`, or None for "not judged"; for a group, a list of them
(`verdicts.py`). An exception, None, or an invalid value gives a `verifier_error`, not a reward of 0.
There is one special case, so that a model cannot learn to crash the function. If a synchronous function of one answer
raises an error that a text can cause (`_OF_THE_TEXT`), raises one again in a second call, and finds the ground truth
correct, the answer is wrong.

An `async` function runs on the actor's event loop, and is cancelled at its deadline. Any other function runs in worker
processes (`worker_pool.py`), which are killed at the deadline.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import resource
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from pipelinerl.errors import RecipeError
from pipelinerl.system.background import raise_if_cancelled
from pipelinerl.system.references import last_line, load_reference, position_of, users_errors
from pipelinerl.system.returned_values import described
from pipelinerl.types import Outcome, Problem, Verdict
from pipelinerl.verifiers.verdicts import checked, verdict_of, verdicts_of
from pipelinerl.verifiers.verifier import (
    GroupVerifier,
    Judgement,
    PerAnswerVerifier,
    SampledAnswer,
    Verifier,
    VerifierContext,
    close,
    failed,
    start,
    timed_out,
    wrong,
)
from pipelinerl.verifiers.worker_pool import WorkerLost, WorkerPool, stopwatch


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the function's parameters. Raises `RecipeError` if they cannot be inspected."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise RecipeError(f"the parameters of {function!r} cannot be inspected: {error}") from None


def lacking(parameters: Iterable[inspect.Parameter], known: Iterable[str]) -> list[str]:
    """Return the names of required parameters that are not in `known`, or are positional-only."""
    names = frozenset(known)
    return [
        each.name
        for each in parameters
        if each.default is each.empty
        and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        and (each.name not in names or each.kind is each.POSITIONAL_ONLY)
    ]


def accepted_names(parameters: Sequence[inspect.Parameter], known: Iterable[str]) -> tuple[str, ...]:
    """Return the names in `known` that the parameters accept; all of `known` if there is a `**kwargs`."""
    everything = any(each.kind is each.VAR_KEYWORD for each in parameters)
    names = {each.name for each in parameters if each.kind is not each.POSITIONAL_ONLY}
    return tuple(name for name in known if everything or name in names)


#: Memory that a worker may allocate beyond its imports.
_MEMORY_BYTES: Final = 4 << 30

#: Arguments that a function which judges one answer may have, by name.
OF_ONE: Final[Mapping[str, Callable[[Problem, SampledAnswer], Any]]] = {
    "problem": lambda problem, _: problem,
    "completion": lambda _, answer: answer.text,
    "completion_text": lambda _, answer: answer.text,
    "prompt": lambda problem, _: [message._asdict() for message in problem.messages],
    "answer": lambda problem, _: problem.ground_truth,
    "ground_truth": lambda problem, _: problem.ground_truth,
    "metadata": lambda problem, _: dict(problem.metadata),
    "token_ids": lambda _, answer: list(answer.token_ids),
    "finish_reason": lambda _, answer: answer.finish_reason,
    "tags": lambda problem, _: problem.tags,
}
#: Arguments that a function of a group may have, by name: lists with an entry per answer. The first three are TRL's.
OF_A_GROUP: Final[Mapping[str, Callable[[Problem, SampledAnswer], Any]]] = {
    "completions": OF_ONE["completion"],
    "prompts": OF_ONE["prompt"],
    "completion_ids": OF_ONE["token_ids"],
    "completion_texts": OF_ONE["completion"],
    **{name: of_one for name, of_one in OF_ONE.items() if not name.startswith("completion") and name != "prompt"},
}
_GROUP_NAMES: Final = frozenset({"completions", "completion_texts"})
#: Names of the answers that a function judges; it has at least one of them.
_ANSWER_NAMES: Final = _GROUP_NAMES | {"completion", "completion_text", "completion_ids", "token_ids"}


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A user's function, and the names of the arguments that it takes by position (`by_place`) and by name (`named`).

    One call judges a single answer or, with `of_group`, all answers of a group.
    The function also gets, by name, the fields of the problem's metadata that `columns` lists. With `takes_all` (it has
    a `**kwargs`), it gets all other fields, too, except those named like one of its arguments.
    """

    function: Callable[..., Any]
    of_group: bool
    by_place: tuple[str, ...]
    named: tuple[str, ...]
    columns: tuple[str, ...]
    takes_all: bool
    is_async: bool

    @classmethod
    def of_callable(cls, function: Callable[..., Any]) -> RewardFunction:
        """Inspect the function's parameters. Raises `RecipeError` if they do not follow this module's conventions."""
        parameters = parameters_of(function)
        names = {parameter.name for parameter in parameters}
        of_group = not names.isdisjoint(_GROUP_NAMES)
        known = OF_A_GROUP if of_group else OF_ONE
        by_place: tuple[str, ...] = ()
        placed = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)][:2]
        if not of_group and _by_place(placed):
            by_place = ("problem", "completion_text")
        rest = parameters[len(by_place) :]
        columns = tuple(lacking(rest, known))
        placeless = [each.name for each in rest if each.kind is each.POSITIONAL_ONLY]
        if columns and (placeless or not (by_place or names & _ANSWER_NAMES)):
            raise RecipeError(
                f"a reward function takes (problem, completion_text), or by name any of {', '.join(OF_ONE)}, or of a "
                f"group any of {', '.join(OF_A_GROUP)}, and columns of the data; got {', '.join(columns)}"
            )
        taken = {each.name for each in placed[: len(by_place)]} | set(by_place)
        named = tuple(name for name in accepted_names(rest, known) if name not in taken)
        call = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
        takes_all = any(each.kind is each.VAR_KEYWORD for each in rest)
        return cls(function, of_group, by_place, named, columns, takes_all, call)

    def calls(self, problem: Problem, answers: Sequence[SampledAnswer]) -> list[Any]:
        """Call the function once for the group, or once per answer; return its results (awaitables if async)."""
        given = problem.metadata
        if missing := [name for name in self.columns if name not in given]:
            raise RecipeError(
                f"the reward function takes {', '.join(missing)}, and the problem's metadata has "
                f"{', '.join(given) or 'no columns'}; name the columns in the source's metadata_fields"
            )
        others = (
            given.keys() - self.named - inspect.signature(self.function).parameters.keys() if self.takes_all else ()
        )
        columns = {name: given[name] for name in (*self.columns, *others)}
        if self.of_group:
            lists = {name: [OF_A_GROUP[name](problem, answer) for answer in answers] for name in self.named}
            return [self.function(**lists, **{name: [value] * len(answers) for name, value in columns.items()})]
        return [
            self.function(
                *(OF_ONE[name](problem, answer) for name in self.by_place),
                **{name: OF_ONE[name](problem, answer) for name in self.named},
                **columns,
            )
            for answer in answers
        ]


def _by_place(placed: Sequence[inspect.Parameter]) -> bool:
    """Return whether the first two parameters, `placed`, are a problem and an answer's text, passed by position."""
    if len(placed) < 2 or any(each.default is not each.empty for each in placed):
        return False
    first, second = (each.name for each in placed)
    mixed = (first != "problem" and first in OF_ONE) or (second in OF_ONE and not second.startswith("completion"))
    return not mixed and not (first in OF_ONE and second in OF_ONE)


# --- where it runs ----------------------------------------------------------------------------------------------------


def open_function(argument: str) -> Callable[[Any], Any]:
    """Load a function; return the function that a worker runs: `[problem, answers]` → verdicts. Raises `UserError`."""
    reference, correct_at = json.loads(argument)
    reward = RewardFunction.of_callable(load_reference(reference))
    place = position_of(reward.function)
    limit_memory()

    def answering(question: Any) -> Any:
        problem = msgspec.convert(question[0], Problem)
        answers = [SampledAnswer(*answer) for answer in question[1]]
        try:
            values = reward.calls(problem, answers)
        except BaseException as error:  # user code may raise anything
            raised = failed(last_line(error, place))
            if isinstance(error, _OF_THE_TEXT) and _refuses(reward, problem, answers, correct_at):
                raised = wrong(f"the function fails on this answer and not on the ground truth: {raised.reason}")
            return msgspec.to_builtins([raised] * len(answers))
        if reward.of_group:
            return msgspec.to_builtins(verdicts_of(values[0], len(answers), correct_at=correct_at, place=place))
        return msgspec.to_builtins([verdict_of(value, correct_at=correct_at, place=place) for value in values])

    return answering


#: Exceptions that an answer's text can cause. Other exceptions come from files, a network, or a bug in the function.
_OF_THE_TEXT: Final = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, SyntaxError, TypeError, ValueError,
)  # fmt: skip


def _refuses(reward: RewardFunction, problem: Problem, answers: Sequence[SampledAnswer], correct_at: float) -> bool:
    """Call the function once more on the answer that made it fail; return True if the answer is at fault.

    It is if the function fails again, with an error that a text can cause, and yet finds the ground truth correct.
    """
    if reward.of_group:
        return False  # it is unknown which answer of the group is at fault
    try:
        reward.calls(problem, answers)
    except _OF_THE_TEXT:
        pass
    except BaseException:  # user code may raise anything
        return False
    else:
        return False
    try:
        value = reward.calls(problem, [SampledAnswer(problem.ground_truth)])[0]
    except BaseException:  # user code may raise anything
        return False
    return verdict_of(value, correct_at=correct_at).outcome is Outcome.CORRECT


def limit_memory() -> None:
    """Let the process allocate only `_MEMORY_BYTES` more; any further allocation raises `MemoryError`."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return  # the file exists only on Linux
    used = int(re.search(r"VmData:\s+(\d+)", status)[1]) << 10  # type: ignore[index]
    resource.setrlimit(resource.RLIMIT_DATA, (used + _MEMORY_BYTES, used + _MEMORY_BYTES))


class PooledReward:
    """A `GroupVerifier` that calls a synchronous function, named by `reference`, in worker processes."""

    def __init__(
        self, reference: str, reward: RewardFunction, *, correct_at: float, deadline_s: float, workers: int | None
    ) -> None:
        self._of_group = reward.of_group
        self._deadline_s = deadline_s
        self._pool = WorkerPool(
            "pipelinerl.verifiers.user_code:open_function",
            json.dumps([reference, correct_at]),
            workers=workers,
            deadline_s=deadline_s,
        )

    async def judge(self, problem: Problem, answers: Sequence[SampledAnswer]) -> list[Judgement]:
        plain = msgspec.to_builtins(problem)
        return await _judged(
            self._of_group, answers, lambda batch: self._verdicts(plain, batch, group=problem.problem_id)
        )

    async def start(self) -> None:
        """Start the first worker, so that the first answer does not wait for the function's import."""
        await self._pool.start()

    async def close(self) -> None:
        await self._pool.close()

    async def _verdicts(self, problem: Any, answers: Sequence[SampledAnswer], *, group: str) -> list[Verdict]:
        question = [problem, [[each.text, list(each.token_ids), each.finish_reason] for each in answers]]
        try:
            return msgspec.convert(await self._pool.ask(question, group=group), list[Verdict])
        except TimeoutError:
            return [timed_out(self._deadline_s)] * len(answers)
        except WorkerLost as error:
            return [failed(str(error))] * len(answers)


class AsyncReward:
    """A `GroupVerifier` that calls an async function on the caller's event loop."""

    def __init__(self, reward: RewardFunction, *, correct_at: float, deadline_s: float) -> None:
        self._reward = reward
        self._place = position_of(reward.function)
        self._correct_at = correct_at
        self._deadline_s = deadline_s

    async def judge(self, problem: Problem, answers: Sequence[SampledAnswer]) -> list[Judgement]:
        return await _judged(self._reward.of_group, answers, lambda batch: self._verdicts(problem, batch))

    async def close(self) -> None:
        """Do nothing: there are no workers."""

    async def _verdicts(self, problem: Problem, answers: Sequence[SampledAnswer]) -> list[Verdict]:
        deadline = asyncio.timeout(self._deadline_s)
        try:
            async with deadline:
                value = await self._reward.calls(problem, answers)[0]
        except BaseException as error:  # user code may raise anything
            raise_if_cancelled(error)
            late = isinstance(error, TimeoutError) and deadline.expired()
            return [timed_out(self._deadline_s) if late else failed(last_line(error, self._place))] * len(answers)
        values = value if self._reward.of_group else [value]
        return verdicts_of(values, len(answers), correct_at=self._correct_at, place=self._place)


async def _judged(
    of_group: bool,
    answers: Sequence[SampledAnswer],
    judge: Callable[[Sequence[SampledAnswer]], Awaitable[list[Verdict]]],
) -> list[Judgement]:
    """Judge all answers in one call if the function takes a group, else each answer concurrently."""

    async def timed(batch: Sequence[SampledAnswer]) -> list[Judgement]:
        lapse = stopwatch()
        verdicts = await judge(batch)
        seconds = lapse() / len(batch)
        return [Judgement(verdict, seconds) for verdict in verdicts]

    batches = [answers] if of_group else [[answer] for answer in answers]
    judged = await asyncio.gather(*map(timed, batches))
    return [judgement for judgements in judged for judgement in judgements]


class Shielded:
    """Wrapper of a user's verifier that turns its exceptions into `verifier_error` and validates its verdicts."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._place = position_of(type(verifier))

    async def verify(self, problem: Problem, completion_text: str) -> Verdict:
        try:
            verdict = await self._verifier.verify(problem, completion_text)
        except BaseException as error:  # user code may raise anything; a deadline comes as a cancellation
            raise_if_cancelled(error)
            return failed(last_line(error, self._place))
        if isinstance(verdict, Verdict):
            return checked(verdict, place=self._place)
        return failed(f"{self._place}: verify must return a Verdict, it returned {described(verdict)}")

    async def start(self) -> None:
        await start(self._verifier)

    async def close(self) -> None:
        await close(self._verifier)


def open_user_code(where: str, reference: str, thing: Any, context: VerifierContext) -> GroupVerifier:
    """Return the verifier of a domain whose recipe names `thing` by `reference` under the key `where`.

    `thing` is a reward function, or a `Verifier`, or a class of it. Raises `RecipeError` if it cannot be called.
    """
    if hasattr(thing, "verify"):
        if inspect.isclass(thing):
            with users_errors(where, thing):
                thing = thing()
        return PerAnswerVerifier(Shielded(thing), deadline_s=context.deadline_s)
    try:
        reward = RewardFunction.of_callable(thing)
    except RecipeError as error:
        raise RecipeError(f"{where}: {reference}: {error}") from None
    if reward.is_async:
        return AsyncReward(reward, correct_at=context.correct_at, deadline_s=context.deadline_s)
    return PooledReward(
        reference, reward, correct_at=context.correct_at, deadline_s=context.deadline_s, workers=context.workers
    )
