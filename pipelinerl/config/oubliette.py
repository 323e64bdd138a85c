"""The section of a domain that says how the programs in its answers are judged; docs/verification.md."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from pipelinerl.config.sections import Section
from pipelinerl.verifiers.oubliette import toolchains
from pipelinerl.verifiers.oubliette.checkers import Checker
from pipelinerl.verifiers.oubliette.rules import CodeRules, Scoring
from pipelinerl.verifiers.oubliette.runs import Tier


class OublietteSection(Section):
    """What the verifier `oubliette` does where a problem's metadata says nothing else."""

    tier: Tier = Tier.DEFAULT
    """The sandbox; where it cannot be had, nothing is judged."""
    language: str = "python"
    """Of a fenced block that names none."""
    languages: tuple[str, ...] = ()
    """Those that are judged; by default `language` alone."""
    scoring: Scoring = Scoring.ALL
    """The reward: 1 where every test is passed (`all`), or the share that is (`share`)."""
    checker: Checker = Checker.TOKENS
    """How outputs are compared: `exact`, `tokens`, `float`."""
    tolerance: float = Field(default=1e-6, ge=0, lt=1)
    """Of the checker `float`."""
    time_limit_s: float = Field(default=4.0, gt=0, le=600)
    """Processor time of one test; on the clock it may take twice that and a second."""
    memory_mb: int = Field(default=512, ge=16, le=65536)
    """Memory of one test, all its processes together."""

    url: Annotated[str, StringConstraints(pattern=r"^(https?://.+)?$")] = ""
    """Of an Oubliette service (`pipelinerl oubliette serve`) that runs the programs; by default this machine does."""
    key_variable: Annotated[str, StringConstraints(pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")] = ""
    """The environment variable that holds the service's token."""
    repository: str = ""
    """The folder into which the links of problems lead (`pipelinerl oubliette upload`), without a service."""

    @model_validator(mode="after")
    def _knows_languages(self) -> Self:
        for name in (self.language, *self.languages):
            if name not in toolchains.LANGUAGES:
                raise ValueError(f"language must be one of {', '.join(toolchains.LANGUAGES)}, got {name!r}")
        if self.languages and self.language not in self.languages:
            raise ValueError(f"languages must hold language ({self.language}), got {', '.join(self.languages)}")
        return self

    @property
    def rules(self) -> CodeRules:
        """As the verifier has them."""
        return CodeRules(
            tier=self.tier,
            language=self.language,
            languages=self.languages or (self.language,),
            scoring=self.scoring,
            checker=self.checker,
            tolerance=self.tolerance,
            time_limit_s=self.time_limit_s,
            memory_bytes=self.memory_mb << 20,
            url=self.url,
            key_variable=self.key_variable,
            repository=self.repository,
        )
