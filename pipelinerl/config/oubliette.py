"""Recipe section for judging programs in a domain's answers; docs/use/verification.md."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from pipelinerl.config.sections import Section
from pipelinerl.verifiers.oubliette import toolchains
from pipelinerl.verifiers.oubliette.checkers import Checker
from pipelinerl.verifiers.oubliette.rules import CodeRules, Scoring
from pipelinerl.verifiers.oubliette.runs import Tier


class OublietteSection(Section):
    """Defaults of the verifier `oubliette`; a problem's metadata may override them."""

    tier: Tier = Tier.DEFAULT
    """The sandbox tier; if it is unavailable, nothing is judged."""
    language: str = "python"
    """Language of a fenced code block that names none."""
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
    """URL of an Oubliette service (`pipelinerl oubliette serve`); by default programs run on this machine."""
    key_variable: Annotated[str, StringConstraints(pattern=r"^([A-Za-z_][A-Za-z0-9_]*)?$")] = ""
    """Name of the environment variable with the service's token."""
    repository: str = ""
    """The folder for links in problems (`pipelinerl oubliette upload`), if there is no service."""

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
        """The settings in the verifier's form."""
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
