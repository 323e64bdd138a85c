"""Where problems come from. A source is a pure function of (seed, split, i): no state, no order of asking, no network.

To add a source, write a function in `generated.py` that makes drafts, or a file that makes whole problems, and a line
in `open_source`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Protocol

from pipelinerl.data.drafts import Split
from pipelinerl.data.generated import GeneratedSource, addition_drafts, reasoning_gym_drafts
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
    own = dict(parameters or {})
    kind, _, task = source.partition(":")
    where = f"domains.{domain}"
    if kind == "jsonl" and not task:
        return JsonlSource.open(own, domain=domain, split=split, seed=seed)
    pattern = _pattern(own.pop("answer_pattern", None), where)
    if kind == "reasoning_gym" and task:
        draw = reasoning_gym_drafts(task, own, where=where)
    elif kind == "addition" and not task:
        draw = addition_drafts(own, where=where)
    else:
        raise RecipeError(f"{where}.source must be reasoning_gym:<task>, addition or jsonl, got {source!r}")
    return GeneratedSource(draw, domain=domain, split=split, seed=seed, pattern=pattern)


def _pattern(answer_pattern: Any, where: str) -> re.Pattern[str] | None:
    if answer_pattern is None:
        return None
    try:
        return re.compile(answer_pattern)
    except (re.error, TypeError) as error:
        raise RecipeError(f"{where}.parameters.answer_pattern must be a regular expression: {error}") from None
