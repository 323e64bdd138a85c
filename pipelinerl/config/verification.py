"""How answers are judged: by one verifier or a weighted sum of rewards (keys of a domain), and in whose processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Self

from pydantic import Field, model_validator

from pipelinerl.config.sections import Section
from pipelinerl.enums import VerifierLocation
from pipelinerl.system.references import is_reference

#: What judges a domain that says nothing else.
DEFAULT_VERIFIER: Final = "math_answer"


class VerificationSection(Section):
    """Whose processes judge answers, and what verifier services may take; docs/verification.md."""

    services: int = Field(default=0, ge=0, le=256)
    """Verifier services that the launcher starts; with 0, each actor judges what it sampled."""
    judged_in: VerifierLocation | None = None
    """`services` where none is started by the launcher but elsewhere; by default what `services` says."""
    cache_mb: int = Field(default=64, ge=0, le=65_536)
    """What a service may keep of verdicts that it need not reach again."""
    grace_s: float = Field(default=60.0, gt=0, le=3600)
    """How long an answer whose service failed is taken to others before it is masked."""
    silence_s: float = Field(default=30.0, ge=5, le=3600)
    """A service that shows no sign of life for so long has failed."""
    timeout_s: float = Field(default=900.0, gt=0, le=86_400)
    """Longest that a service may take for the answers to one problem, its queue included."""

    @property
    def uses_services(self) -> bool:
        """Whether actors leave judging to services."""
        return (
            self.judged_in or (VerifierLocation.SERVICES if self.services else VerifierLocation.ACTORS)
        ) is VerifierLocation.SERVICES

    @model_validator(mode="after")
    def _are_used(self) -> Self:
        if self.services and not self.uses_services:
            raise ValueError(f'services ({self.services}) must be 0 where judged_in = "actors": nobody would ask them')
        return self


class RewardPartSection(Section):
    """One of the rewards that a domain adds up: a function of the user's, or a registered verifier."""

    function: str
    weight: float = 1.0
    name: str = ""
    """Under which it is shown; by default the function's."""

    @property
    def shown_as(self) -> str:
        """Its name in figures."""
        return self.name or (self.function.rpartition(":")[2] if is_reference(self.function) else self.function)


def contradictions(verifier: str | None, rewards: tuple[RewardPartSection, ...]) -> Iterator[str]:
    """What a domain cannot say at once."""
    if verifier is not None and rewards:
        yield "verifier and rewards exclude each other; name the verifier as one of rewards"
    names = [part.shown_as for part in rewards]
    if len(set(names)) != len(names):
        yield f"rewards must have names of their own, got {', '.join(names)}; give each a name"
    if unweighted := [part.shown_as for part in rewards if part.weight == 0]:
        yield f"rewards.weight must not be 0, as it is of {', '.join(unweighted)}; leave it out"
