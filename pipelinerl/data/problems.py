"""Opening of problem sources by the name that a recipe gives, through the registry.

To add a source to the package, write a function `(SourceRequest) -> ProblemSource` and a line in `registry.SOURCES`. A
user's own source is a function in the user's file that takes the recipe's `parameters` and returns problems
(`user_source.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from pipelinerl import registry
from pipelinerl.data.drafts import Split
from pipelinerl.data.files.rows import FirstRows
from pipelinerl.data.files.source import RowSource
from pipelinerl.data.prompts import NO_PROMPTS, Prompts
from pipelinerl.data.source import ProblemSource, SourceRequest
from pipelinerl.data.user_source import open_users
from pipelinerl.errors import RecipeError
from pipelinerl.types import Problem

__all__ = ["ProblemSource", "Split", "open_source"]

#: Number of a generator's problems that are checked; all its problems, including evaluation's, are of the same kind.
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
    """Open the source that a recipe names: a registered one, with an argument after its colon, or a user's own.

    Raises:
        RecipeError: the source is unknown, or its parameters or its file are invalid.
    """
    request = SourceRequest(domain=domain, split=split, seed=seed, parameters=dict(parameters or {}), prompts=prompts)
    return _opened(source, request)


def look_at(source: str, request: SourceRequest, head: FirstRows, check: Callable[[Problem], None]) -> Problem | None:
    """Make and check the first problems of the source that a recipe names; return the first problem, or None if there
    is none.

    `head` limits how much data is checked. Of a generator a few problems suffice, since all are of one kind.

    Args:
        check: raises `RecipeError` for a problem that cannot be verified.

    Raises:
        RecipeError: a problem cannot be made, or is rejected; the message names its row, or else its id.
    """
    name, argument = _name_of(source)
    if name in registry.LOOKS:
        first: Problem | None = registry.resolve(registry.LOOKS[name])(replace(request, argument=argument), head, check)
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
    """Check only the source's name; for a user's source, import its file.

    Raises:
        RecipeError: the source is unknown, or a package that it needs is not installed.
    """
    registry.find(f"domains.{domain}.source", registry.SOURCES, _name_of(source)[0])


def _name_of(source: str) -> tuple[str, str]:
    """Return the registered name of a source and the text after its colon.

    A user's reference, which has its own colon, is returned whole as the name.
    """
    name, _, argument = source.partition(":")
    return (name, argument) if name in registry.SOURCES else (source, "")
