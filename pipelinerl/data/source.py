"""`ProblemSource`, the interface of a source, and `SourceRequest`, the arguments with which it is opened.

A source is a pure function of (seed, split, i). It keeps no state, does not depend on the order of calls, and uses no
network.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from pipelinerl.data.drafts import Split
from pipelinerl.data.prompts import NO_PROMPTS, Prompts
from pipelinerl.types import Problem


class ProblemSource(Protocol):
    """An endless (training) or finite (validation, held-out) sequence of problems."""

    def problem(self, index: int) -> Problem:
        """Return problem `index` ≥ 0, the same one each time. Raises `RecipeError` past the end of a finite source."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRequest:
    """Arguments with which a source is opened.

    Attributes:
        argument: the text after the colon of the source's name, such as the task of reasoning_gym.
        domain: the domain's name, which its problems carry.
        split: the split to open.
        seed: determines the order of problems.
        parameters: the source's own parameters in the recipe.
        prompts: the domain's prompts.
    """

    argument: str = ""
    domain: str
    split: Split
    seed: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    prompts: Prompts = NO_PROMPTS

    @property
    def where(self) -> str:
        """The domain's path in the recipe; error messages begin with it."""
        return f"domains.{self.domain}"
