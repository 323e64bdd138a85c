"""Users' own sources: a function in a user's file that takes the recipe's `parameters` and returns problems.

    def problems(level: int = 1):
        return [{"prompt": f"{a}+{a}=", "answer": str(2 * a)} for a in range(1000)]

Each problem is a dict with `prompt` or `messages`, `answer` and optionally `metadata` and `tags`. The hash of its
question decides its split, as for rows of files, unless the function has a parameter `split`. Such a function is called
once per split, with the split's name. A function may also have a parameter `seed`.

An object with a method `problem(index)` that returns `Problem`s, such as an endless generator, is a `ProblemSource` and
is used directly.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Final, final

from pipelinerl.data.drafts import Split
from pipelinerl.data.files.field_map import FieldMap
from pipelinerl.data.files.rows import RowSequence
from pipelinerl.data.files.source import Indexed, index_of, source_of_rows
from pipelinerl.data.source import ProblemSource, SourceRequest
from pipelinerl.errors import RecipeError
from pipelinerl.types import Message, Problem

#: Longest list of problems; a larger source must be a `ProblemSource` or files.
MOST_ROWS: Final = 10_000_000


@final
class UserSource:
    """A user's `ProblemSource`, with the domain's prompts added."""

    def __init__(self, source: Any, request: SourceRequest) -> None:
        self._source = source
        self._request = request

    def problem(self, index: int) -> Problem:
        """Return the user's problem `index`. Raises `RecipeError` for an invalid problem."""
        problem = self._source.problem(index)
        if not isinstance(problem, Problem) or not all(isinstance(each, Message) for each in problem.messages):
            raise RecipeError(
                f"{self._request.where}.source: problem({index}) must return a Problem with Messages, got "
                f"{problem!r:.80}"
            )
        return self._request.prompts.dress(replace(problem, domain=self._request.domain))


def open_users(function: Any, request: SourceRequest) -> ProblemSource:
    """Open the source that a user's function returns.

    Raises:
        RecipeError: it is not a function, does not take the recipe's parameters, or returns no problems.
    """
    if not callable(function):
        raise RecipeError(f"{request.where}.source must name a function, got {function!r:.80}")
    wanted = inspect.signature(function).parameters.keys() - request.parameters.keys()
    given = dict(request.parameters) | ({"seed": request.seed} if "seed" in wanted else {})
    by_split = "split" in wanted
    made = _called(function, given | ({"split": request.split.value} if by_split else {}), request)
    if callable(getattr(made, "problem", None)):
        return UserSource(made, request)
    field_map = FieldMap(tags_field="tags", template=request.prompts.template)
    indexed = {request.split if by_split else Split.TRAIN: _indexed(made, field_map, function, request)}
    for split in set(Split) - {request.split} if by_split else ():
        made = _called(function, given | {"split": split.value}, request)
        indexed[split] = _indexed(made, field_map, function, request)
    return source_of_rows(indexed, field_map, request)


def _called(function: Callable[..., Any], given: dict[str, Any], request: SourceRequest) -> Any:
    try:
        inspect.signature(function).bind(**given)
    except TypeError as error:
        raise RecipeError(f"{request.where}.parameters do not fit {_name(function)}: {error}") from None
    return function(**given)


def _indexed(made: Any, field_map: FieldMap, function: Callable[..., Any], request: SourceRequest) -> Indexed:
    if not isinstance(made, Iterable) or isinstance(made, str | bytes | dict):
        raise RecipeError(
            f"{request.where}.source: {_name(function)} must return problems, as dicts with prompt and answer, or an "
            f"object with a method problem(index); got {made!r:.80}"
        )
    rows: Any = made  # not copied into a list: a data set may make its rows on demand
    if not (hasattr(made, "__len__") and hasattr(made, "__getitem__")):
        rows = list(itertools.islice(made, MOST_ROWS + 1))
    if len(rows) > MOST_ROWS:
        raise RecipeError(
            f"{request.where}.source: {_name(function)} returns more than {MOST_ROWS:,} problems; return an object "
            "with a method problem(index) for an endless source"
        )
    return index_of(RowSequence(rows, _name(function)), field_map)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", repr(function))
