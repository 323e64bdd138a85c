"""`OublietteSection`: options of the sandbox for programs, `[domains.oubliette]` in a recipe."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from pipelinerl.plugins.oubliette import toolchains
from pipelinerl.plugins.oubliette.checkers import Checker, Scoring
from pipelinerl.plugins.oubliette.runs import Tier
from pipelinerl.section import Section


class OublietteSection(Section):
    """Defaults of the verifier `oubliette`, a sandbox for programs; a problem's metadata may override them."""

    tier: Tier = Tier.DEFAULT
    """The strength of the sandbox's isolation; if it is unavailable, nothing is judged."""
    language: str = "python"
    """Language of a fenced code block that does not name its language."""
    languages: tuple[str, ...] = ()
    """Languages that are judged; by default `language` alone."""
    scoring: Scoring = Scoring.ALL
    """The reward: 1 if every test passes (`all`), or the share of passed tests (`share`)."""
    checker: Checker = Checker.TOKENS
    """Comparison of outputs: `exact`, `tokens`, `float`."""
    tolerance: float = Field(default=1e-6, ge=0, lt=1)
    """Tolerance of the checker `float`."""
    time_limit_s: float = Field(default=4.0, gt=0, le=600)
    """CPU time of one test; its wall-clock limit is twice that plus one second."""
    memory_mb: int = Field(default=512, ge=16, le=65536)
    """Memory of one test, shared by all its processes."""

    url: Annotated[str, StringConstraints(pattern=r"^(https?://.+)?$")] = ""
    """URL of an Oubliette service (`pipelinerl sandbox serve`); by default programs run on this machine."""
    key_variable: Annotated[str, StringConstraints(pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")] = ""
    """Name of the environment variable with the service's token."""
    repository: str = ""
    """Folder that holds the files that problems link to (`pipelinerl sandbox upload`), if there is no service."""

    @model_validator(mode="after")
    def _knows_languages(self) -> Self:
        for name in (self.language, *self.languages):
            if name not in toolchains.LANGUAGES:
                raise ValueError(f"language must be one of {', '.join(toolchains.LANGUAGES)}, got {name!r}")
        if self.languages and self.language not in self.languages:
            raise ValueError(f"languages must hold language ({self.language}), got {', '.join(self.languages)}")
        return self

    @property
    def accepted_languages(self) -> tuple[str, ...]:
        return self.languages or (self.language,)

    @property
    def memory_bytes(self) -> int:
        return self.memory_mb << 20
