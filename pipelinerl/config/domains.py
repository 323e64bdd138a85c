"""`DomainSection`: a `[[domains]]` block of a recipe. It says where problems come from, and what judges the answers."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from pipelinerl.config.learning import RewardSection
from pipelinerl.config.sections import Section


class DomainSection(Section):
    """A kind of problem: where its problems come from, what verifies them, and its share of the mixture."""

    name: str
    source: str
    verifier: str = "math_answer"
    weight: float = Field(default=1.0, gt=0)
    parameters: dict[str, Any] = Field(default_factory=dict)
    reward: RewardSection | None = None
