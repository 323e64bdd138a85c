"""Functions that open the problem source that a recipe names: a registered source, or a user's function.

To add a source to the package, write a function `(SourceRequest) -> ProblemSource` and its component, which
`registry.SOURCES` names. A user's source is a function in the user's file that takes the recipe's `parameters` and
returns problems:

    def problems(level: int = 1):
        return [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(1000)]

Each problem is a dict with `prompt` or `messages`, `answer` and optionally `metadata` and `tags`. The hash of its
question decides its split, as for rows of files. A function with a parameter `split` is instead called once per split,
with the split's name. A function may also have a parameter `seed`. It may also return a `ProblemSource`, an object with
a method `problem(index)` that returns `Problem`s.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from pipelinerl import registry
from pipelinerl.component import imported
from pipelinerl.data.files.field_map import FieldMap
from pipelinerl.data.files.rows import FirstRows, RowSequence
from pipelinerl.data.files.source import SPLIT_BY, Indexed, RowSource, SplitBy, index_of, source_of_rows
from pipelinerl.data.prompts import NO_PROMPTS, Prompts
from pipelinerl.data.source import ProblemSource, SourceRequest, Split
from pipelinerl.errors import RecipeError
from pipelinerl.system.references import users_errors
from pipelinerl.types import Message, Problem

__all__ = ["ProblemSource", "Split", "open_source"]

#: Number of a generator's problems that are checked; they suffice, since all its problems are of the same kind.
_OF_A_GENERATOR: Final = 2


def open_source(
    source: str,
    *,
    domain: str,
    split: Split,
    seed: int,
    parameters: Mapping[str, Any] | None = None,
    prompts: Prompts = NO_PROMPTS,
) -> ProblemSource:
    """Open a source `name`, `name:argument` or `file.py:function`. Raises `RecipeError` if it is invalid."""
    request = SourceRequest(domain=domain, split=split, seed=seed, parameters=dict(parameters or {}), prompts=prompts)
    return _opened(source, request)


def look_at(source: str, request: SourceRequest, head: FirstRows, check: Callable[[Problem], None]) -> Problem | None:
    """Build and check a source's first problems, at most `head`; return the first one, or None if there is none.

    Raises `RecipeError`, which names a row or id, if a problem cannot be built, or `check` raises `RecipeError`.
    """
    name, argument = _name_of(source)
    component = registry.SOURCES.get(name)
    if component is not None and component.look:
        first: Problem | None = imported(component.look)(replace(request, argument=argument), head, check)
        return first
    opened = _opened(source, request)
    count = min(len(opened), head.rows) if isinstance(opened, RowSource) else _OF_A_GENERATOR
    for index in range(count):
        problem = opened.problem(index)
        try:
            check(problem)
        except RecipeError as error:
            place = opened.place(index) if isinstance(opened, RowSource) else f"{request.where}: {problem.problem_id}"
            raise RecipeError(f"{place}: {error}") from None
    return opened.problem(0)


def _opened(source: str, request: SourceRequest) -> ProblemSource:
    name, argument = _name_of(source)
    opener = registry.load(f"{request.where}.source", registry.SOURCES, name)
    if name not in registry.SOURCES:
        return open_users(opener, request)
    opened: ProblemSource = opener(replace(request, argument=argument))
    return opened


def check_source(source: str, *, domain: str) -> None:
    """Raise `RecipeError` if a source is unknown, needs a package that is missing, or cannot be imported."""
    registry.find(f"domains.{domain}.source", registry.SOURCES, _name_of(source)[0])


def _name_of(source: str) -> tuple[str, str]:
    """Split `name:argument` of a registered source into the two; for a user's reference return (`source`, "")."""
    name, _, argument = source.partition(":")
    return (name, argument) if name in registry.SOURCES else (source, "")


#: Largest number of problems that a user's function may return; a larger source must be a `ProblemSource` or files.
MOST_ROWS: Final = 10_000_000


class UserSource:
    """Wrapper of a user's `ProblemSource` that adds the domain's prompts (system prompt, template) to each problem."""

    def __init__(self, source: Any, request: SourceRequest) -> None:
        self._source = source
        self._request = request

    def problem(self, index: int) -> Problem:
        with users_errors(f"{self._request.where}.source", self._source.problem):
            problem = self._source.problem(index)
        if not isinstance(problem, Problem) or not all(isinstance(each, Message) for each in problem.messages):
            raise RecipeError(
                f"{self._request.where}.source: problem({index}) must return a Problem with Messages, got "
                f"{problem!r:.80}"
            )
        return self._request.prompts.dress(replace(problem, domain=self._request.domain))


def open_users(function: Any, request: SourceRequest) -> ProblemSource:
    """Call a user's function and open the source that it returns. Raises `RecipeError` if that is invalid or empty."""
    if not callable(function):
        raise RecipeError(f"{request.where}.source must name a function, got {function!r:.80}")
    accepted, given, by = inspect.signature(function).parameters.keys(), dict(request.parameters), SplitBy.PROMPT
    if SPLIT_BY not in accepted:
        by = SplitBy.taken_from(given, where=request.where)
    wanted = accepted - given.keys()
    given |= {"seed": request.seed} if "seed" in wanted else {}
    by_split = "split" in wanted
    made = _called(function, given | ({"split": request.split.value} if by_split else {}), request)
    if callable(getattr(made, "problem", None)):
        return UserSource(made, request)
    field_map = FieldMap(tags_field="tags", template=request.prompts.template)
    indexed = {request.split if by_split else Split.TRAIN: _indexed(made, field_map, function, request, by)}
    for split in set(Split) - {request.split} if by_split else ():
        made = _called(function, given | {"split": split.value}, request)
        indexed[split] = _indexed(made, field_map, function, request, by)
    return source_of_rows(indexed, field_map, request, by=by)


def _called(function: Callable[..., Any], given: dict[str, Any], request: SourceRequest) -> Any:
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        raise RecipeError(f"{request.where}.parameters do not fit {_name(function)}: {error}") from None
    with users_errors(f"{request.where}.source", function):
        return function(**given)


def _indexed(
    made: Any, field_map: FieldMap, function: Callable[..., Any], request: SourceRequest, by: SplitBy
) -> Indexed:
    if not isinstance(made, Iterable) or isinstance(made, str | bytes | dict):
        raise RecipeError(
            f"{request.where}.source: {_name(function)} must return problems, as dicts with prompt and answer, or an "
            f"object with a method problem(index); got {made!r:.80}"
        )
    rows: Any = made  # a sequence is not copied into a list, since a data set may build its rows on demand
    if not (hasattr(made, "__len__") and hasattr(made, "__getitem__")):
        with users_errors(f"{request.where}.source", function):
            rows = list(itertools.islice(made, MOST_ROWS + 1))
    if len(rows) > MOST_ROWS:
        raise RecipeError(
            f"{request.where}.source: {_name(function)} returns more than {MOST_ROWS:,} problems; return an object "
            "with a method problem(index) for an endless source"
        )
    return index_of(RowSequence(rows, _name(function)), field_map, by)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
