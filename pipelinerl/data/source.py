"""`ProblemSource`: what a source is; and `SourceRequest`: what one is opened for.

A source is a pure function of (seed, split, i): it keeps no state and no order of asking, and asks no network.
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
        """Problem `index` ≥ 0, the same one each time. Raises `RecipeError` past the end of a finite source."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRequest:
    """What a source is opened for.

    Attributes:
        argument: what stands after the colon of the name, such as the task of reasoning_gym.
        domain: the domain's name, which its problems carry.
        split: which part of the problems.
        seed: of the order in which they come.
        parameters: the source's own.
        prompts: how the domain asks.
    """

    argument: str = ""
    domain: str
    split: Split
    seed: int
    parameters: Mapping[str, Any] = field(default_factory=dict)
    prompts: Prompts = NO_PROMPTS

    @property
    def where(self) -> str:
        """The domain's path in the recipe, with which errors begin."""
        return f"domains.{self.domain}"
