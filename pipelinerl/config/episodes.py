"""The section of a domain that bounds its episodes: docs/environments.md."""

from __future__ import annotations

from pydantic import Field

from pipelinerl.config.sections import Section
from pipelinerl.environments.environment import EpisodeLimits, History


class EpisodeSection(Section):
    """Bounds of one episode of a domain with an environment."""

    max_turns: int = Field(default=20, ge=1, le=10_000)
    """Answers of the model, those of sub-agents included."""
    timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """Longest time of one episode; an episode that takes longer is masked."""
    turn_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of one answer; by default the domain's `max_tokens`."""
    history: History = History.EXACT
    """How a conversation is continued: by its sampled tokens (`exact`), or by the chat template (`template`)."""

    @property
    def limits(self) -> EpisodeLimits:
        """As the actor has them."""
        return EpisodeLimits(
            max_turns=self.max_turns, timeout_s=self.timeout_s, turn_tokens=self.turn_tokens, history=self.history
        )
