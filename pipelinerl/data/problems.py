"""Where problems come from. A source is a pure function of (seed, split, i): no state, no order of asking, no network.

To add a source: a file beside this one that makes drafts (or whole problems), and a line in `open_source`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from pipelinerl.data import reasoning_gym
from pipelinerl.data.drafts import Split
from pipelinerl.data.generated import GeneratedSource, addition_drafts
from pipelinerl.data.jsonl import JsonlSource
from pipelinerl.errors import RecipeError
from pipelinerl.types import Problem

__all__ = ["ProblemSource", "Split", "open_source"]


class ProblemSource(Protocol):
    """An endless (training) or finite (validation, held-out) sequence of problems."""

    def problem(self, index: int) -> Problem:
        """Problem `index` ≥ 0, the same one each time. Raises `RecipeError` past the end of a finite source."""
        ...


def open_source(
    source: str, *, domain: str, split: Split, seed: int, parameters: Mapping[str, Any] | None = None
) -> ProblemSource:
    """The source that a recipe names.

    Args:
        source: `reasoning_gym:<task>`, `addition`, or `jsonl`.
        domain: the domain's name, which its problems carry.
        split: which part of the problems.
        seed: of the order in which they come.
        parameters: the source's own; for any generator also `answer_pattern`, a regular expression that the whole
            answer must match.

    Raises:
        RecipeError: the source is unknown, its parameters are wrong, or its file is.
    """
    given = dict(parameters or {})
    kind, _, task = source.partition(":")
    where = f"domains.{domain}"
    if kind == "jsonl" and not task:
        return JsonlSource.open(given, domain=domain, split=split, seed=seed)
    pattern = _pattern(given.pop("answer_pattern", None), where)
    if kind == "reasoning_gym" and task:
        draw = reasoning_gym.drafts(task, given, where=where)
    elif kind == "addition" and not task:
        draw = addition_drafts(given, where=where)
    else:
        raise RecipeError(f"{where}.source must be reasoning_gym:<task>, addition or jsonl, got {source!r}")
    return GeneratedSource(draw, domain=domain, split=split, seed=seed, pattern=pattern)


def _pattern(given: Any, where: str) -> re.Pattern[str] | None:
    if given is None:
        return None
    try:
        return re.compile(given)
    except (re.error, TypeError) as error:
        raise RecipeError(f"{where}.parameters.answer_pattern must be a regular expression: {error}") from None
