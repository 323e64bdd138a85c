"""Recipe section with the limits of a domain's episodes: docs/start/environments.md."""

from __future__ import annotations

from pydantic import Field

from pipelinerl.config.sections import Section
from pipelinerl.environments.environment import EpisodeLimits, History


class EpisodeSection(Section):
    """Limits of one episode in a domain with an environment."""

    max_turns: int = Field(default=20, ge=1, le=10_000)
    """The most model answers per episode, including those of sub-agents."""
    timeout_s: float = Field(default=600.0, gt=0, le=86_400)
    """Time limit of one episode; an episode that exceeds it is masked."""
    turn_tokens: int | None = Field(default=None, ge=1)
    """The most tokens of one answer; by default the domain's `max_tokens`."""
    history: History = History.EXACT
    """Continuation of a conversation: from its sampled tokens (`exact`), or by the chat template (`template`)."""

    @property
    def limits(self) -> EpisodeLimits:
        """The limits in the actor's form."""
        return EpisodeLimits(
            max_turns=self.max_turns, timeout_s=self.timeout_s, turn_tokens=self.turn_tokens, history=self.history
        )
