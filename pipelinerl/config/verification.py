"""Keys of a domain that say how its answers are judged: by one verifier, or by a weighted sum of rewards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from pipelinerl.config.sections import Section
from pipelinerl.system.references import is_reference

#: What judges a domain that says nothing else.
DEFAULT_VERIFIER: Final = "math_answer"


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
