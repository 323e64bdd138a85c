"""Recipe sections for verification: where answers are judged, and a domain's rewards (docs/use/verification.md)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Self

from pydantic import Field, model_validator

from pipelinerl.enums import VerifierLocation
from pipelinerl.section import Section
from pipelinerl.system.references import is_reference


class VerificationSection(Section):
    """The processes that judge answers, and limits of verifier services; docs/use/verification.md."""

    services: int = Field(default=0, ge=0, le=256)
    """Verifier services that the launcher starts; with 0, each actor judges its own samples."""
    judged_in: VerifierLocation | None = None
    """The processes that judge answers, by default as `services` implies; needed only if services run elsewhere."""
    cache_mb: int = Field(default=64, ge=0, le=65_536)
    """Verdict cache of each service."""
    grace_s: float = Field(default=60.0, gt=0, le=3600)
    """The longest time for retrying an answer at other services after its service failed; then it is masked."""
    silence_s: float = Field(default=30.0, ge=5, le=3600)
    """Silence after which a service counts as failed."""
    timeout_s: float = Field(default=900.0, gt=0, le=86_400)
    """Time limit of a service for the answers to one problem, including its queue."""

    @property
    def uses_services(self) -> bool:
        """True if verifier services judge the answers, instead of the actors."""
        return bool(self.services) if self.judged_in is None else self.judged_in is VerifierLocation.SERVICES

    @model_validator(mode="after")
    def _are_used(self) -> Self:
        if self.services and not self.uses_services:
            raise ValueError(f'services ({self.services}) must be 0 where judged_in = "actors": they would be unused')
        return self


class RewardPartSection(Section):
    """One term of a domain's reward: a user's function, or a registered verifier."""

    function: str
    """A user's function (`path.py:name`), or the name of a registered verifier."""
    weight: float = 1.0
    """Factor of this term; must not be 0."""
    name: str = ""
    """Name of this term in figures; by default the name of the function."""

    @property
    def shown_as(self) -> str:
        """The name of this term in metrics."""
        return self.name or (self.function.rpartition(":")[2] if is_reference(self.function) else self.function)


def contradictions(verifier: str | None, rewards: tuple[RewardPartSection, ...]) -> Iterator[str]:
    """Yield a message for each contradiction between a domain's verifier and rewards."""
    if verifier is not None and rewards:
        yield "verifier and rewards exclude each other; name the verifier as one of rewards"
    names = [part.shown_as for part in rewards]
    if len(set(names)) != len(names):
        yield f"rewards must have unique names, got {', '.join(names)}; give each a name"
    if unweighted := [part.shown_as for part in rewards if part.weight == 0]:
        yield f"rewards.weight must not be 0, as it is for {', '.join(unweighted)}; leave it out"


#: The verifier of a domain that names no verifier.
DEFAULT_VERIFIER: Final = "math_answer"
